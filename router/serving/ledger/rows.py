"""One row a request: what is counted, what is billed, and what it cost the engine.

What counts is said in `serving/counting.py`. A request whose gateway was killed under it has the finish `unknown`:
nothing of it is counted or billed, and `raw_usage` holds an upper bound, {"upper_bound": {"input_tokens": …,
"output_tokens": …}}: the prompt, and what the answer might have had.

Work, by the engine model of `core.Rates` (one formula a step, fitted to NVIDIA's operator tables: papers.md §4), for a
prompt of L tokens, n of them uncached, and o tokens of output, while B requests of ours ran there on average:

    prefill_ms   c1·n + c2·n·(L − n/2)
    decode_ms    o · (c0/B + c4 + c3·(L + o/2))       its share of each step's fixed time, and what it adds to the step
    kv_token_s   L/2 · prefill_s + (L + o/2) · decode_s           tokens it held in KV memory × time, by the clock

For work alone, where nothing is known to have been cached, what was predicted is taken to be.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import msgspec

from router.core import Usage
from router.serving.counting import Counted, count, is_billed
from router.serving.ledger.reading import Ended, Unknown
from router.serving.ledger.records import End, Mark
from router.serving.pricing import FREE, Bill, Hits, PriceBook, Tokens, UnknownCached, bill
from router.store.schema import TOKEN_CLASSES

UNKNOWN = "unknown"
_DAY_S = 86_400
_MOST_MONEY = Decimal(9_000_000)  # what a row can hold
_COLUMNS = tuple(f"{name}_tokens" for name in TOKEN_CLASSES)

Row = dict[str, Any]


def row_of(read: Ended | Unknown, prices: PriceBook, unknown_cached: UnknownCached) -> Row:
    """For the table `requests`."""
    if isinstance(read, Unknown):
        return _unknown_row(read.mark)
    end = read.end
    counted = count(end, Usage(*end.usage) if end.usage is not None else None)
    tokens = Tokens.of(counted.usage)
    blind_hit_tokens = end.predicted_hit_tokens if end.blind_hit_tokens is None else end.blind_hit_tokens
    billed = FREE
    if is_billed(end.finish):
        billed = bill(
            prices.price_at(end.model, end.tenant, end.at),
            tokens,
            Hits(counted.cached_known, end.predicted_hit_tokens, blind_hit_tokens),
            unknown_cached,
        )
    prefill_ms, decode_ms, kv_token_s = work(read.mark, end, counted, read.beside) if read.mark is not None else _IDLE
    return {
        **_who_and_when(end),
        "blind_hit_tokens": blind_hit_tokens,
        "instance": (end.instance or "")[:200],
        "status": end.status,
        "finish": end.finish,
        "error": end.error[:60],
        **dict(zip(_COLUMNS, tokens.counts, strict=True)),
        "cached_known": counted.cached_known,
        "estimated": counted.estimated,
        "ttft_s": end.ttft_s,
        "took_s": end.took_s,
        "prefill_ms": prefill_ms,
        "decode_ms": decode_ms,
        "kv_token_s": kv_token_s,
        **money(billed),
        "raw_usage": counted.usage.raw or None,
    }


_IDLE = (0.0, 0.0, 0.0)


def work(mark: Mark, end: End, counted: Counted, beside: float) -> tuple[float, float, float]:
    """prefill_ms, decode_ms, kv_token_s. `beside`: how many of ours ran there, this one among them."""
    usage, rates = counted.usage, mark.rates
    length, output = usage.input_tokens, usage.output_tokens
    if not length and not output:
        return _IDLE
    cached = usage.cached_tokens if usage.cached_tokens is not None else min(end.predicted_hit_tokens, length)
    prefill_ms = rates.prefill_ms(length - cached, length)
    step_ms = rates.c0_ms / max(beside, 1.0) + rates.c4_ms + rates.c3_ms * (length + output / 2)
    there_s = max(0.0, end.took_s - end.queue_s)
    prefill_s = min(there_s, max(0.0, end.ttft_s - end.queue_s)) if end.ttft_s is not None else 0.0
    kv_token_s = length / 2 * prefill_s + (length + output / 2) * (there_s - prefill_s)
    return prefill_ms, output * step_ms, kv_token_s


def _unknown_row(mark: Mark) -> Row:
    bound = {"input_tokens": mark.prompt_tokens, "output_tokens": mark.output_bound}
    return {
        **_who_and_when(mark),
        "blind_hit_tokens": mark.predicted_hit_tokens,
        "instance": mark.instance[:200],
        "status": 0,
        "finish": UNKNOWN,
        "error": "gateway_killed",
        **dict.fromkeys(_COLUMNS, 0),
        "cached_known": False,
        "estimated": True,
        "ttft_s": None,
        "took_s": 0.0,
        "prefill_ms": 0.0,
        "decode_ms": 0.0,
        "kv_token_s": 0.0,
        **money(FREE),
        "raw_usage": msgspec.json.encode({"upper_bound": bound}).decode(),
    }


def _who_and_when(record: Mark | End) -> Row:
    """What both records tell."""
    return {
        "day": int(record.at // _DAY_S),
        "id": record.serial[:128],
        "shown_id": record.shown_id if record.shown_id != record.serial else None,
        "at": record.at,
        "tenant": record.tenant,
        "project": record.project,
        "key": record.key,
        "model": record.model[:200],
        "end_user": record.end_user or None,
        "tags": list(record.tags),
        "asked_model": (record.asked_model or record.model)[:200],
        "route": record.route[:60],
        "stream": record.stream,
        "attempts": record.attempts,
        "best_hit_tokens": record.best_hit_tokens,
        "predicted_hit_tokens": record.predicted_hit_tokens,
        "queue_s": record.queue_s,
    }


def money(billed: Bill) -> Row:
    price = billed.price
    return {
        "price": price.id if price is not None else None,
        "currency": price.currency if price is not None else None,
        "cost": min(billed.cost, _MOST_MONEY),
        "output_cost": min(billed.output, _MOST_MONEY),
        "cost_without_cache": min(billed.without_cache, _MOST_MONEY),
        "cost_cache_blind": min(billed.cache_blind, _MOST_MONEY),
    }
