"""What every policy promises, ours and strangers': run on all that are installed, skipping none."""

from __future__ import annotations

import math
import random
import tomllib
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core import Candidate, Cost, Policy, Rates, Snapshot

GROUP = "warmroute.policies"


def _declared() -> list[EntryPoint]:
    """Those of this checkout, whether or not it is installed."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    return [EntryPoint(name, value, GROUP) for name, value in project["entry-points"][GROUP].items()]


POLICIES = sorted({(entry.name, entry.value) for entry in [*_declared(), *entry_points(group=GROUP)]})

tokens = st.integers(0, 200_000)
times = st.floats(0, 1e6)


@st.composite
def candidates(draw: st.DrawFn, prompt_tokens: int) -> tuple[Candidate, ...]:
    count = draw(st.integers(1, 6))
    return tuple(
        Candidate(
            f"engine-{number}",
            draw(st.integers(0, 3)),
            hit_tokens=draw(st.integers(0, prompt_tokens - 1)),
            held_tokens=draw(st.dictionaries(st.sampled_from(["gpu", "host", "disk", "remote"]), tokens)),
            confidence=draw(st.floats(0, 1)),
            booked_requests=draw(st.integers(0, 500)),
            booked_prefill_ms=draw(times),
            booked_prefill_tokens=draw(tokens),
            booked_kv_tokens=draw(st.integers(0, 10_000_000)),
            running=draw(st.integers(0, 500)),
            waiting=draw(st.integers(0, 500)),
            kv_usage=draw(st.floats(0, 1)),
            load_age_s=draw(times),
            capacity_tokens=draw(tokens),
            rates=draw(st.sampled_from([Rates(), Rates(c1_ms=0.06, c0_ms=15.8)])),
            recent_tokens=draw(tokens),
        )
        for number in range(count)
    )


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    prompt_tokens = draw(st.integers(1, 200_000))
    return Snapshot(
        at=draw(times),
        tokens=prompt_tokens,
        candidates=draw(candidates(prompt_tokens)),
        model=draw(st.sampled_from(["", "m", "模型"])),
        tenant=draw(st.sampled_from(["", "acme"])),
        session=draw(st.none() | st.text(max_size=8)),
        output_tokens=draw(st.integers(0, 100_000)),
    )


def load(value: str) -> type[Policy]:
    made: type[Policy] = EntryPoint("", value, GROUP).load()
    return made


def test_there_are_policies_to_test() -> None:
    assert {"kv_aware", "lmetric", "least_work", "round_robin", "session"} <= {name for name, _ in POLICIES}


@cache
def drawn() -> list[Snapshot]:
    """300 of them, the same for every policy: to draw one costs a hundred times what a policy does with it."""
    found: list[Snapshot] = []

    @settings(max_examples=300)
    @given(snapshots())
    def draw(snapshot: Snapshot) -> None:
        found.append(snapshot)

    draw()
    return found


@pytest.mark.parametrize(("name", "value"), POLICIES)
def test_one_finite_cost_per_candidate_whose_parts_sum_to_it(name: str, value: str) -> None:
    for seed, snapshot in enumerate(drawn()):
        costs = load(value)({}, random.Random(seed)).costs(snapshot)
        assert len(costs) == len(snapshot.candidates)
        for cost in costs:
            assert isinstance(cost, Cost)
            assert math.isfinite(cost.value)
            assert cost.value >= 0
            assert cost.unit in ("ms", "rank")
            assert all(part >= 0 for part in cost.parts.values())
            assert sum(cost.parts.values()) == pytest.approx(cost.value)


@pytest.mark.parametrize(("name", "value"), POLICIES)
def test_the_snapshot_is_left_alone(name: str, value: str) -> None:
    for snapshot in drawn():
        before = msgspec.json.encode(snapshot)
        load(value)({}, random.Random(0)).costs(snapshot)
        assert msgspec.json.encode(snapshot) == before


@pytest.mark.parametrize(("name", "value"), POLICIES)
def test_no_dice_but_those_given(name: str, value: str) -> None:
    """Two policies with equal dice agree on any history, whatever the state of the global dice."""
    for seed in range(60):
        history = drawn()[5 * seed :][: 1 + seed % 5]
        one, two = (load(value)({}, random.Random(seed)) for _ in range(2))
        for shot in history:
            random.seed(1)
            first = one.costs(shot)
            random.seed(2)
            assert list(two.costs(shot)) == list(first)


FORBIDDEN = ("open", "socket.socket.connect", "time.time", "time.monotonic", "time.perf_counter", "subprocess.Popen")


@pytest.mark.parametrize(("name", "value"), POLICIES)
def test_no_io_and_no_clock(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load(value)({}, random.Random(0))
    snapshot = Snapshot(0.0, 100, (Candidate("a", 0), Candidate("b", 0)), session="s")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError(f"{name} reached outside its snapshot")

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", refuse)
        for target in FORBIDDEN[1:]:
            patch.setattr(target, refuse)
        policy.costs(snapshot)
