"""What is counted, billed, and taken for work, by how a request ended."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest

from router.core import Usage
from router.serving.ledger.reading import Ended, Unknown
from router.serving.ledger.records import End
from router.serving.ledger.rows import Row, row_of
from router.serving.pricing import Price, PriceBook, UnknownCached, parts_per_token
from router.store.schema import requests
from tests.router.serving.ledger.made import AT, DAY, end, mark

USAGE = Usage(1000, 20, 900)
BOOK = PriceBook(
    [Price("p", "*", None, "USD", parts_per_token({"uncached_input": "2", "cache_read": "1", "output": "10"}), 0.0)]
)


def made(end: End, unknown_cached: UnknownCached = "full_price") -> Row:
    return row_of(Ended(end, mark(), 2.0), BOOK, unknown_cached)


@pytest.mark.parametrize(
    ("fields", "uncached", "read", "output", "estimated", "cached_known", "cost"),
    [
        pytest.param({}, 100, 900, 20, False, True, "0.0013", id="as the engine says"),
        pytest.param({"usage": Usage(1000, 0, 0)}, 1000, 0, 0, False, True, "0.002", id="explicit zeros"),
        pytest.param({"usage": Usage(1000, 20)}, 1000, 0, 20, False, False, "0.0022", id="cached not told"),
        pytest.param({"usage": Usage(10, 1, 10, doubtful=True)}, 0, 10, 1, True, True, "0.00002", id="doubtful"),
        pytest.param({"usage": None}, 1000, 0, 21, True, False, "0.00221", id="no usage: our count, and events"),
        pytest.param({"usage": None, "billable": False}, 0, 0, 0, False, True, "0", id="no work for an engine"),
        pytest.param({"status": 400, "usage": None}, 0, 0, 0, False, True, "0", id="refused by the engine"),
        pytest.param({"finish": "client_gone", "status": 499, "usage": None}, 1000, 0, 21, True, False, "0.00221",
                     id="left"),
        pytest.param({"finish": "client_gone", "status": 499, "usage": None, "events": 0}, 1000, 0, 0, True, False,
                     "0.002", id="left before the first token"),
        pytest.param({"finish": "client_gone", "status": 499, "events_after_usage": 7}, 100, 900, 27, True, True,
                     "0.00137", id="left some events after the usage"),
        pytest.param({"finish": "client_gone", "status": 499}, 100, 900, 20, False, True, "0.0013",
                     id="left after the usage"),
        pytest.param({"finish": "client_gone", "status": 499, "usage": None, "instance": None}, 0, 0, 0, False, True,
                     "0", id="left while it waited"),
        pytest.param({"finish": "upstream_failed", "status": 502, "usage": None, "events": 0}, 0, 0, 0, False, True,
                     "0", id="failed"),
        pytest.param({"finish": "upstream_failed", "status": 200, "usage": None}, 1000, 0, 21, True, False, "0",
                     id="broke off: counted, and not billed"),
    ],
)  # fmt: skip
def test_what_counts(
    fields: dict[str, Any], uncached: int, read: int, output: int, estimated: bool, cached_known: bool, cost: str
) -> None:
    usage = fields.get("usage", USAGE)
    row = made(end(usage=usage, **{name: value for name, value in fields.items() if name != "usage"}))
    assert (row["uncached_input_tokens"], row["cache_read_tokens"], row["output_tokens"]) == (uncached, read, output)
    assert (row["estimated"], row["cached_known"], row["cost"]) == (estimated, cached_known, Decimal(cost))


def test_a_row_has_every_column() -> None:
    names = {column.name for column in requests.columns}
    assert made(end()).keys() == names
    assert row_of(Unknown(mark()), BOOK, "full_price").keys() == names


def test_a_prediction_is_billed_where_it_is_to_be_and_never_counted() -> None:
    row = made(end(usage=Usage(1000, 0)), "predicted")
    assert (row["cost"], row["cache_read_tokens"], row["cached_known"]) == (Decimal("0.0012"), 0, False)


def test_what_its_gateway_was_killed_over_is_listed_with_a_bound_and_free() -> None:
    row = row_of(Unknown(mark(shown_id="theirs", tags=("t",), end_user="abc")), BOOK, "full_price")
    assert (row["finish"], row["estimated"], row["cost"], row["day"]) == ("unknown", True, 0, DAY)
    assert json.loads(row["raw_usage"]) == {"upper_bound": {"input_tokens": 1000, "output_tokens": 4096}}
    assert (row["uncached_input_tokens"], row["output_tokens"]) == (0, 0)
    assert (row["id"], row["shown_id"], row["tags"], row["end_user"]) == ("r1", "theirs", ["t"], "abc")


def test_work() -> None:
    """c0 10, c1 0.1, c3 0.001, c4 1 ms; two requests on the engine, half a second in the room, the first token 0.1 s
    later, the last 2 s after that."""
    row = made(end())
    assert row["prefill_ms"] == pytest.approx(100 * 0.1)
    assert row["decode_ms"] == pytest.approx(20 * (10 / 2 + 1 + 0.001 * 1010))
    assert row["kv_token_s"] == pytest.approx(500 * 0.1 + 1010 * 2.0)
    assert made(end(usage=Usage(1000, 20)))["prefill_ms"] == pytest.approx(
        200 * 0.1
    )  # as predicted, for want of better
    waited = end(instance=None, usage=None, status=503, finish="upstream_failed")
    never_sent = row_of(Ended(waited, None, 1.0), BOOK, "full_price")
    assert (never_sent["prefill_ms"], never_sent["instance"], never_sent["at"]) == (0.0, "", AT)


def test_no_text_is_longer_than_its_column() -> None:
    row = made(end(model="m" * 500, asked_model="n" * 500, error="e" * 500, route="/" * 500, instance="i" * 500))
    for name in ("model", "asked_model", "error", "route", "instance"):
        assert len(row[name]) == requests.c[name].type.length  # type: ignore[attr-defined]


def test_no_cost_is_more_than_a_row_can_hold() -> None:
    dear = PriceBook([Price("p", "*", None, "USD", parts_per_token({"output": "1000000"}), 0.0)])
    row = row_of(Ended(end(usage=Usage(0, 2**31 - 1)), mark(), 1.0), dear, "full_price")
    assert 0 < row["cost"] * 10**12 < 2**63
