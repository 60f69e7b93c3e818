from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from types import ModuleType

import pytest

from router.errors import ConfigError
from router.lab.arms import Arm, parse_arm
from router.lab.compare import compare
from router.lab.fleet_model import EngineSpec
from router.lab.profiles import PROFILES
from router.lab.replay import Setup
from router.lab.traces import Trace, TraceRequest

ENGINE = EngineSpec(PROFILES["llama-3.1-8b-h100"])


def trace(*requests: tuple[float, int]) -> Trace:
    """Of (arrival, input tokens); nothing is shared."""
    made = [
        TraceRequest(str(n), at, tokens, 2, [n << 20 | block for block in range(-(-tokens // 512))])
        for n, (at, tokens) in enumerate(requests)
    ]
    return Trace("t", 512, made)


ONE_AFTER_THE_OTHER = trace((0, 30_000), (0.1, 20_000), (0.2, 600))


def test_one_run_an_arm_in_their_order() -> None:
    arms = [parse_arm(name) for name in ("lmetric", "kv_aware", "lmetric:room")]
    runs = compare(ONE_AFTER_THE_OTHER, arms, Setup(engines=[ENGINE]))
    assert [run.measures.policy for run in runs] == [run.replayed.policy for run in runs] == [arm.name for arm in arms]
    assert [run.replayed.room is not None for run in runs] == [False, True, True]
    assert all(run.measures.requests == 3 for run in runs)


def test_the_order_in_the_engines_is_the_arms() -> None:
    """While the longest is computed two wait: the engine takes the older one next, or the shorter one."""
    setup = Setup(engines=[ENGINE])
    first, shortest = compare(ONE_AFTER_THE_OTHER, [parse_arm("lmetric"), parse_arm("lmetric:shortest")], setup)
    for run, order in ((first, ["0", "1", "2"]), (shortest, ["0", "2", "1"])):
        began = sorted(run.replayed.served, key=lambda served: served.first_token_at or 0.0)
        assert [served.id for served in began] == order


def test_the_same_seed_gives_the_same_figures() -> None:
    load = trace(*((n * 0.01, 3_000) for n in range(40)))
    setup, arms = Setup(engines=[ENGINE] * 4, not_streamed=0.5), [parse_arm("random")]
    once, again, other = (compare(load, arms, setup, seed=seed)[0].measures for seed in (1, 1, 2))
    assert once == again
    assert once != other


def test_progress_names_the_arm() -> None:
    heard: list[tuple[str, int]] = []
    arms = [parse_arm("lmetric"), parse_arm("random")]
    load = trace(*((float(n), 100) for n in range(250)))
    compare(load, arms, Setup(engines=[ENGINE]), progress=lambda arm, ended: heard.append((arm.name, ended)))
    assert heard == [("lmetric", 100), ("lmetric", 200), ("random", 100), ("random", 200)]


class Demanding:
    def __init__(self, weights: Mapping[str, float], dice: random.Random) -> None:
        raise ValueError("say how much a metre costs")


def test_a_policy_that_cannot_be_had_stops_it_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("demanding")
    module.Demanding = Demanding  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "demanding", module)
    load = trace(*((float(n), 100) for n in range(100)))
    heard: list[Arm] = []
    for last, words in (
        (Arm("far", "demanding:Demanding", None), "far: say how much a metre costs"),
        (parse_arm("lmetrik"), "no 'lmetrik' in warmroute.policies .did you mean 'lmetric'"),
    ):
        with pytest.raises(ConfigError, match=words):
            compare(
                load,
                [parse_arm("lmetric"), last],
                Setup(engines=[ENGINE]),
                progress=lambda arm, ended: heard.append(arm),
            )
    assert heard == []
