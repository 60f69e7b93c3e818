"""What the composition root makes of the configuration's policies."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from router.config import PolicyChoice, WaitingRoom
from router.errors import ConfigError
from router.routing.room_rule import RoomRule
from router.routing.shadow import Shadows
from router.routing.waiting_room import RoomLimits
from router.settings import open_shadows, room_settings, ttft_slo_ms


class Demanding:
    """A policy that will not do without a weight."""

    def __init__(self, weights: Any, dice: Any) -> None:
        raise ValueError("the weight 'alpha' must be given")


def shadows(*names: str) -> Shadows | None:
    return open_shadows(PolicyChoice(shadow=names), lambda when, call: None, lambda: 0.0)


def test_shadows_are_loaded_by_name() -> None:
    made = shadows("lmetric", "llmd")
    assert made is not None
    assert list(made.counts) == ["lmetric", "llmd"]
    assert shadows() is None


@pytest.mark.parametrize(
    ("name", "said"),
    [("lmetrik", "did you mean 'lmetric'"), (f"{__name__}:Demanding", "policy.shadow: .*'alpha' must be given")],
)
def test_a_shadow_that_cannot_be_loaded_stops_the_start(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        shadows(name)


def test_the_objective_for_a_prompt() -> None:
    assert ttft_slo_ms(PolicyChoice()) is None
    fixed = ttft_slo_ms(PolicyChoice(ttft_slo_s=2.0))
    scaled = ttft_slo_ms(PolicyChoice(ttft_slo_s=1.0, ttft_slo_per_1k_tokens_ms=62.5))
    assert fixed is not None
    assert scaled is not None
    assert (fixed(0), fixed(100_000)) == (2000.0, 2000.0)
    assert (scaled(0), scaled(1_000), scaled(32_000)) == (1000.0, 1062.5, 3000.0)


def test_the_waiting_rooms_rule_and_limits() -> None:
    asked = WaitingRoom(free_tokens=100, head_start_max_s=7.0, gap_s=0.0, max_requests=3, wait_s=9.0)
    rule, limits = room_settings(asked)
    assert (rule.free_tokens, rule.head_start_max_s, rule.gap_s) == (100, 7.0, 0.0)
    assert (limits.requests, limits.wait_s) == (3, 9.0)
    assert room_settings(WaitingRoom()) == (RoomRule(), RoomLimits())


@pytest.mark.parametrize("gap_s", [-0.001, 10.001, float("nan")])
def test_a_gap_lasts_from_nothing_to_ten_seconds(gap_s: float) -> None:
    with pytest.raises(ValidationError, match="gap_s"):
        WaitingRoom(gap_s=gap_s)
