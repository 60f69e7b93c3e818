"""The example policy, loaded as its README says: by name of module and class, nothing installed."""

from __future__ import annotations

import random
import tomllib
from pathlib import Path

import pytest

from router import plugins
from router.core import Candidate, Policy, Snapshot

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "custom_policy"


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Policy:
    monkeypatch.syspath_prepend(EXAMPLE)
    kind = plugins.load(plugins.POLICIES, "warmroute_zone:NearestZone")
    made: Policy = kind({"crossing_ms": 100.0}, random.Random(0))
    return made


def _snapshot(*, near_hit: int, far_hit: int) -> Snapshot:
    near = Candidate("a", 0, hit_tokens=near_hit, labels={"zone": "near"})
    far = Candidate("b", 0, hit_tokens=far_hit, labels={"zone": "far"})
    return Snapshot(at=0.0, tokens=32_768, candidates=(near, far))


def test_stays_in_the_zone(policy: Policy) -> None:
    near, far = policy.costs(_snapshot(near_hit=0, far_hit=0))
    assert far.value - near.value == pytest.approx(100.0)
    assert sum(far.parts.values()) == pytest.approx(far.value)


def test_leaves_it_for_a_cache_that_is_worth_the_way(policy: Policy) -> None:
    near, far = policy.costs(_snapshot(near_hit=0, far_hit=30_000))
    assert far.value < near.value


def test_its_entry_point_is_what_the_readme_names() -> None:
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    assert project["entry-points"] == {"warmroute.policies": {"nearest_zone": "warmroute_zone:NearestZone"}}
    assert "name: nearest_zone" in (EXAMPLE / "README.md").read_text()
