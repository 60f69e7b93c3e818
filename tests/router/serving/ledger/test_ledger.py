"""What the gateway tells the ledger, and what comes into the spool of it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from router.core import Outcome
from router.serving.ledger.ledger import Ledger
from router.serving.ledger.reading import Ended, Reader
from router.serving.ledger.spool import Spool
from tests.router.serving.ledger.made import mark

REFUSED = Outcome(
    "r1", "m", "ten_1", None, None, 503, "upstream_failed", None, 0, 0, 0, None, "none", 0.0, 0.0, None, 0.1, False,
    attempts=0, route="/v1/chat/completions",
)  # fmt: skip


def ended(folder: Path, *outcomes: Outcome, full: bool = False) -> list[Ended]:
    spool = Spool(folder, max_bytes=1 << 20)
    spool.append(mark("sent"))
    spool.full = full
    for outcome in outcomes:
        Ledger(spool).ended(outcome)
    reader = Reader(folder)
    assert reader.claim()
    return [read for read in reader.read(100) if isinstance(read, Ended)]


def test_what_was_refused_leaves_a_row_if_it_is_known_what_was_asked(tmp_path: Path) -> None:
    strange = msgspec.structs.replace(REFUSED, request_id="r2", route="")
    assert [read.end.serial for read in ended(tmp_path, REFUSED, strange)] == ["r1"]


def test_a_full_spool_takes_the_end_of_what_was_sent_and_of_nothing_else(tmp_path: Path) -> None:
    """Also where it was sent somewhere, and has no place at its end: else its mark would stay open."""
    sent = msgspec.structs.replace(REFUSED, request_id="sent", attempts=1)
    (read,) = ended(tmp_path, REFUSED, sent, full=True)
    assert read.mark == mark("sent")
