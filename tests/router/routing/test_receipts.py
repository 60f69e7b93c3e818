from __future__ import annotations

from itertools import pairwise

from router.core import Candidate, Cost, Decision, Scored
from router.routing.receipts import PACE_S, RECEIPT_CANDIDATES, RECEIPTS, Receipts


def decision(policy: str = "p", candidates: int = 1) -> Decision:
    return Decision(policy, tuple(Scored(Candidate(str(n), 0), Cost(1.0, {})) for n in range(candidates)))


def test_the_last_decisions_are_kept_the_last_of_an_id_first() -> None:
    receipts = Receipts()
    for number in range(RECEIPTS + 1):
        receipts.keep(f"r{number}", decision(), 0.0)
    receipts.keep("r7", decision("again"), 0.0)
    assert receipts.get("r0") is None
    assert receipts.get("r7") == decision("again")
    assert receipts.get(f"r{RECEIPTS}") == decision()


def test_a_flood_is_sampled_at_an_even_pace() -> None:
    receipts = Receipts()
    now, number = 0.0, 0
    while now < 60:
        number += 1
        now += PACE_S / 7
        receipts.keep(str(number), decision(), now)
    kept = [n for n in range(number - 6999, number + 1) if receipts.get(str(n)) is not None]
    assert RECEIPTS - 2 <= len(kept) <= RECEIPTS
    gaps = {later - earlier for earlier, later in pairwise(kept)}
    assert gaps <= {6, 7, 8}
    for number in range(100):  # and once it is over, everything is kept again
        receipts.keep(f"calm-{number}", decision(), now + 1 + number)
        assert receipts.get(f"calm-{number}") is not None


def test_of_a_large_fleet_the_best_are_kept() -> None:
    receipts = Receipts()
    receipts.keep("r", decision(candidates=64), 0.0)
    kept = receipts.get("r")
    assert kept is not None
    assert [scored.candidate.instance for scored in kept.scored] == [str(n) for n in range(RECEIPT_CANDIDATES)]
