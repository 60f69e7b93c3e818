"""What a replay compares: a policy, and when and in which order requests reach the engines.

kv_aware             a policy by name; kv_aware in the waiting room, as the gateway runs it, all others at arrival
lmetric:room         in the waiting room
kv_aware:gapless     the same, but engines do not rest between prefills
kv_aware:push        at arrival
lmetric:shortest     at arrival, and engines serve the shortest uncached prompt first
dynamo:wspt          when an engine has room, the shortest uncached prompt first, without bound and without hold
lmetric:fcfs         when an engine has room, in the order of arrival, without hold
lmetric:hold         the same with hold
"""

from __future__ import annotations

from math import inf

import msgspec

from router.lab.engine import Order
from router.routing.room_rule import RoomRule

_RULES: dict[str, RoomRule | None] = {
    "push": None,
    "shortest": None,
    "room": RoomRule(),
    "gapless": RoomRule(gap_s=0.0),
    "wspt": RoomRule(
        head_start=1e6, head_start_max_s=1e12, head_start_of_wait=inf, told_apart_s=1e6, hold=False, gap_s=0.0
    ),
    "fcfs": RoomRule(head_start_max_s=0.0, head_start_backlog=0.0, hold=False, gap_s=0.0),
    "hold": RoomRule(head_start_max_s=0.0, head_start_backlog=0.0, gap_s=0.0),
}
MODES = tuple(_RULES)
_OF_ITS_OWN = {"kv_aware": "room"}


class Arm(msgspec.Struct, frozen=True):
    name: str  # as it was asked for
    policy: str
    room: RoomRule | None
    order: Order = "first_come"


def parse_arm(text: str) -> Arm:
    """Raises ValueError for a mode that does not exist; whether the policy does is not looked at."""
    policy, colon, mode = text.rpartition(":")
    if not colon or (mode not in _RULES and "." in policy):  # module:attr names a policy too
        policy, mode = text, _OF_ITS_OWN.get(text, "push")
    if not policy or mode not in _RULES:
        raise ValueError(f"{text!r}: a policy's name, and perhaps one of {', '.join(f':{mode}' for mode in MODES)}")
    return Arm(text, policy, _RULES[mode], "shortest_first" if mode == "shortest" else "first_come")
