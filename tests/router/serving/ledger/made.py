"""Records as a gateway writes them."""

from __future__ import annotations

from typing import Any

import msgspec

from router.core import Rates, Usage
from router.serving.ledger.records import End, Mark

AT = 1_800_000_000.0  # the beginning of an hour
HOUR, DAY = int(AT // 3600), int(AT // 86_400)
RATES = Rates(c0_ms=10.0, c1_ms=0.1, c2_ms=0.0, c3_ms=0.001, c4_ms=1.0)


def mark(serial: str = "r1", **fields: Any) -> Mark:
    return msgspec.structs.replace(
        Mark(
            serial, serial, AT, "ten_1", "proj_1", "key_1", "m", "", "/v1/chat/completions", "A", True, 1, 1000, 4096,
            "", (), 900, 800, 0.5, RATES,
        ),
        **fields,
    )  # fmt: skip


def end(serial: str = "r1", usage: Usage | None = Usage(1000, 20, 900), **fields: Any) -> End:  # noqa: B008 (frozen)
    return msgspec.structs.replace(
        End(
            serial, serial, AT, "ten_1", "proj_1", "key_1", "m", "", "/v1/chat/completions", "A", True, 200, "complete",
            "", 1, msgspec.structs.astuple(usage) if usage is not None else None, 1000, 21, 0, True, 900, 800, 0.5,
            0.6, 2.6, "", (),
        ),
        **fields,
    )  # fmt: skip
