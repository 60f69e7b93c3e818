"""Policies side by side: the same trace on the same engines, one replay after the other."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from router import plugins
from router.core import Policy
from router.errors import ConfigError
from router.lab.arms import Arm
from router.lab.measures import Measures, measure
from router.lab.replay import Replay, Replayed, Setup
from router.lab.traces import Trace


class Run(msgspec.Struct):
    """One arm's replay, and what it comes to."""

    measures: Measures
    replayed: Replayed


def compare(
    trace: Trace,
    arms: Sequence[Arm],
    setup: Setup,
    *,
    seed: int = 0,
    progress: Callable[[Arm, int], None] | None = None,
) -> list[Run]:
    """One run per arm, in their order. Every run begins with empty engines and the same dice.

    setup: whether there is a waiting room, and the order inside the engines, is each arm's own.
    progress: called now and then with the arm and how many of its requests have ended.

    Raises ConfigError, before anything runs, for a policy that cannot be loaded.
    """
    policies = [_load(arm, seed) for arm in arms]
    return [_run(trace, arm, policy, setup, seed, progress) for arm, policy in zip(arms, policies, strict=True)]


def _load(arm: Arm, seed: int) -> Policy:
    make: Callable[..., Policy] = plugins.load(plugins.POLICIES, arm.policy)
    try:
        return make({}, random.Random(seed))
    except ValueError as error:  # it insists on weights
        raise ConfigError([f"{arm.name}: {error}"]) from error


def _run(
    trace: Trace, arm: Arm, policy: Policy, setup: Setup, seed: int, progress: Callable[[Arm, int], None] | None
) -> Run:
    engines = [msgspec.structs.replace(spec, order=arm.order) for spec in setup.engines]
    replay = Replay(
        trace,
        msgspec.structs.replace(setup, engines=engines, room=arm.room),
        policy,
        name=arm.name,
        seed=seed,
        progress=None if progress is None else lambda ended: progress(arm, ended),
    )
    replayed = replay.run()
    return Run(measure(replayed), replayed)
