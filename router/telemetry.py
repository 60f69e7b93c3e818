"""What happened, in numbers: a listener to outcomes that counts, and the page that Prometheus reads.

Counting is a few additions to plain ints on the loop; nothing is shared, so nothing is locked. The page is written in
a thread from copies. Labels come from configuration and from short lists of ours, never from a client: a model that
nobody serves counts as "unknown", and past `_SERIES` series of one metric the rest count as "other".
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from router.core import Caller, Outcome
from router.http.client import PoolStats
from router.http.proxies import Client

RECENT_OUTCOMES = 1000

_SERIES = 2000
_HISTOGRAMS = 200  # a histogram is some twenty series
_COUNTED_AT_ONCE = 64  # outcomes: less than 100 µs
_LAG_SAMPLE_S = 0.25
_OTHER = "other"
_ROWS_AT_ONCE = 32

Row = Mapping[str, Any]
"""What is known of a rank (`core.Live.fleet`)."""

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 40.0, 80.0)
_TPOT_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)
_DURATION_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_QUEUE_S = (0.0001, 0.0005, 0.001, 0.005, 0.02, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0)
_DECISION_S = (5e-6, 1e-5, 2e-5, 4e-5, 8e-5, 1.6e-4, 3.2e-4, 6.4e-4, 1.28e-3, 5e-3, 2e-2)
_LAG_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)

_RANK_GAUGES = {
    "kv_usage": "Share of the rank's KV memory that running requests pin, by the engine's word.",
    "running": "Requests running there, by the engine's word.",
    "waiting": "Requests waiting there, by the engine's word.",
    "booked_requests": "Requests of ours that have not ended there.",
    "booked_prefill_ms": "Prefill work of ours there that is not past its first token, in milliseconds.",
    "confidence": "How far the index is believed for this rank, 0 to 1.",
    "index_blocks": "Blocks the index holds for this rank.",
}

_LIMITER = {
    "gateways": "Gateways that share the limits, as Redis last told.",
    "redis_failures_total": "How often Redis stopped answering in time.",
    "untold": "What Redis has still to be told of what was used while it was away.",
}

_ISOLATION = {
    "kv_tokens": ("domain", "Tokens of a domain of isolation that lie in the engines' caches, by estimate."),
    "lost_tokens": (
        "domain",
        "Tokens that others had asked before, and that isolation let be computed again, at most.",
    ),
    "verified": ("instance", "1: the engine has been seen to keep caches apart."),
}

_ROOM = {
    "waiting": "Requests that wait since no engine has room for them.",
    "held": "Requests that wait for the engine that holds their prefix.",
    "lacking_memory": "Of all who wait, those for whom no free engine had KV memory at their last look.",
    "oldest_seconds": "How long the request has waited that has waited longest.",
    "longest_seconds": "How long the request waited that waited longest of those placed, since the start.",
    "placed_at_once_total": "Requests placed as they arrived.",
    "placed_total": "Requests placed after a wait.",
    "refused_total": "Requests refused at arrival, since too many waited.",
    "expired_total": "Requests refused that had waited too long.",
    "left_total": "Requests whose client left while they waited.",
}

_CALLERS = {
    "keys": "Keys that work, as far as they are known here.",
    "tenants": "Tenants, archived ones too.",
    "store_up": "1: keys, tenants and rules are read from the database as they change. 0: it is away.",
    "store_read_age_seconds": "How old what is known of them is.",
}

_LEDGER = {
    "rows_total": "Requests whose row is in the database.",
    "rows_refused_total": "Rows that the database did not take: they are set aside in state_dir.",
    "store_up": "1: rows are being written to the database. 0: it is away, and they wait in the spool.",
    "writer_up": "1: the ledger's writer is at work.",
    "spool_bytes": "What waits for the database in state_dir.",
    "spool_held_bytes": "What waits in memory, since the disk takes nothing.",
    "spool_full": "1: no further request can be accounted for, so that none is taken.",
    "spool_lost_total": "Records of requests that could not be kept.",
}

_TOKEN_COUNTS = {
    "input": ("warmroute_input_tokens", "Prompt tokens."),
    "untold": ("warmroute_cached_unknown_requests", "Answers that did not tell what had been cached."),
    "told": ("warmroute_input_tokens_told", "Prompt tokens of answers that told their hit: what hits are a share of."),
    "output": ("warmroute_output_tokens", "Tokens generated."),
    "best_hit": ("warmroute_best_hit_tokens", "Hit tokens on the rank that held most."),
    "blind_hit": (
        "warmroute_blind_hit_tokens",
        "Hit tokens to be expected of a placement that does not look at caches.",
    ),
    "predicted_hit": ("warmroute_predicted_hit_tokens", "Hit tokens predicted for the rank that was chosen."),
    "delivered_hit": ("warmroute_delivered_hit_tokens", "Hit tokens the engine told of."),
}

_access = logging.getLogger("warmroute.access")


class Counts:
    """A counter by labels; at most `_SERIES` of them, then "other"."""

    __slots__ = ("_cells", "help", "labels", "name")

    def __init__(self, name: str, help: str, labels: Sequence[str]) -> None:
        self.name = name
        self.help = help
        self.labels = labels
        self._cells: dict[tuple[str, ...], _Cell] = {}

    def cell(self, key: tuple[str, ...]) -> _Cell:
        """Where one series is counted."""
        cells = self._cells
        if key not in cells and len(cells) >= _SERIES:
            key = (_OTHER,) * len(self.labels)
        return cells.setdefault(key, _Cell())

    def metric(self) -> Metric:
        family = CounterMetricFamily(self.name, self.help, labels=self.labels)
        for key, cell in list(self._cells.items()):
            family.add_metric(key, cell.count)
        return family


class _Cell:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Histogram:
    """Counts in fixed buckets, by one label."""

    __slots__ = ("_bounds", "_series", "help", "label", "name")

    def __init__(self, name: str, help: str, bounds: tuple[float, ...], *, label: str | None = "model") -> None:
        self.name = name
        self.help = help
        self.label = label
        self._bounds = bounds
        self._series: dict[str, _Buckets] = {}

    def observe(self, value: float, key: str = "") -> None:
        self.buckets(key).add(value)

    def buckets(self, key: str) -> _Buckets:
        """Where one series is counted."""
        buckets = self._series.get(key)
        if buckets is None:
            if len(self._series) >= _HISTOGRAMS:
                key = _OTHER
            buckets = self._series.setdefault(key, _Buckets(self._bounds))
        return buckets

    def metric(self) -> Metric:
        family = HistogramMetricFamily(self.name, self.help, labels=[self.label] if self.label else [])
        for key, buckets in list(self._series.items()):
            family.add_metric([key] if self.label else [], self._cumulative(list(buckets.counts)), buckets.total)
        return family

    def _cumulative(self, counts: list[int]) -> list[tuple[str, float]]:
        rows: list[tuple[str, float]] = []
        below = 0
        for bound, count in zip((*self._bounds, float("inf")), counts, strict=True):
            below += count
            rows.append(("+Inf" if bound == float("inf") else f"{bound:g}", below))
        return rows


class _Buckets:
    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class _Tokens:
    """Token totals of one model on one instance."""

    __slots__ = ("best_hit", "blind_hit", "delivered_hit", "input", "output", "predicted_hit", "told", "untold")

    def __init__(self) -> None:
        self.input = self.told = self.untold = self.output = 0
        self.best_hit = self.blind_hit = self.predicted_hit = self.delivered_hit = 0

    def add(self, outcome: Outcome) -> None:
        self.input += outcome.input_tokens
        self.best_hit += outcome.best_hit_tokens
        self.blind_hit += outcome.blind_hit_tokens
        self.predicted_hit += outcome.predicted_hit_tokens
        if outcome.delivered_hit_tokens is not None:
            self.told += outcome.input_tokens
            self.delivered_hit += outcome.delivered_hit_tokens
        elif outcome.usage is not None:
            self.untold += 1
        if outcome.usage is not None:
            self.output += outcome.usage.output_tokens


class _Series:
    """Where outcomes of one kind are counted. `placed`: tokens, and time in placement; None: they never were."""

    __slots__ = ("cells", "duration", "placed")

    def __init__(self, cells: list[_Cell], duration: _Buckets, placed: tuple[_Tokens, _Buckets] | None) -> None:
        self.cells = cells
        self.duration = duration
        self.placed = placed


class Telemetry:
    """Give `observe` the outcomes; ask for `page`.

    fleet: one mapping a rank with "instance", "rank" and the values of `_RANK_GAUGES` (`core.Live.fleet`).
    feed: counts of the event feed by name; each becomes `warmroute_kv_{name}_total`.
    reordered_tools: requests by model whose tools came in another order than before.
    room: figures of the waiting room by the names of `_ROOM`.
    shadows: by policy, with "agreed", "differed", "errors" and "regret".
    isolation: by the names of `_ISOLATION` and label.
    connections: by instance, what has become of the connections to it.
    refused: by status, the requests that the HTTP server refused.
    callers: figures of what is known of keys by the names of `_CALLERS`.
    strangers: by code, the requests whose caller was not let in.
    ledger: figures of the ledger by the names of `_LEDGER`.
    limits: `serving.limits.Limiter.figures`.
    """

    def __init__(
        self,
        *,
        fleet: Callable[[], Iterable[Row]] = tuple,
        feed: Callable[[], Mapping[str, int]] = dict,
        reordered_tools: Callable[[], Mapping[str, int]] = dict,
        room: Callable[[], Mapping[str, float]] = dict,
        shadows: Callable[[], Mapping[str, Mapping[str, float]]] = dict,
        isolation: Callable[[], Mapping[str, Mapping[str, float]]] = dict,
        connections: Callable[[], Mapping[str, PoolStats]] = dict,
        refused: Callable[[], Mapping[int, int]] = dict,
        callers: Callable[[], Mapping[str, float]] = dict,
        strangers: Callable[[], Mapping[str, int]] = dict,
        ledger: Callable[[], Mapping[str, float]] = dict,
        limits: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._limits = limits
        self._connections = connections
        self._refused = refused
        self._callers = callers
        self._strangers = strangers
        self._ledger = ledger
        self._room = room
        self._shadows = shadows
        self._isolation = isolation
        self._fleet = fleet
        self._feed = feed
        self._reordered_tools = reordered_tools
        self._recent: deque[Outcome] = deque(maxlen=RECENT_OUTCOMES)
        self._uncounted: list[Outcome] = []
        self._lag_max = 0.0
        self._requests = Counts("warmroute_requests", "Requests that ended.", ("model", "finish", "status"))
        self._errors = Counts("warmroute_errors", "Requests that ended with an error.", ("model", "error"))
        self._retries = Counts("warmroute_retries", "Further attempts at a request.", ("model",))
        self._resumed = Counts(
            "warmroute_resumed_streams", "Streams that another engine went on with.", ("model", "finish")
        )
        self._faults = Counts(
            "warmroute_engine_faults", "Attempts that an engine failed before its first byte.", ("model", "fault")
        )
        self._prompts = Counts("warmroute_prompt_source", "How prompts were read.", ("model", "source"))
        self._delivered = Counts("warmroute_delivered_source", "Where hit counts came from.", ("model", "source"))
        self._tokens: dict[tuple[str, str], _Tokens] = {}
        self._series: dict[tuple[object, ...], _Series] = {}
        self._ttft = Histogram("warmroute_ttft_seconds", "From the request to the first token of a stream.", _TTFT_S)
        self._tpot = Histogram("warmroute_tpot_seconds", "Time per further output token of a stream.", _TPOT_S)
        self._duration = Histogram("warmroute_request_duration_seconds", "From request to end.", _DURATION_S)
        self._queue = Histogram("warmroute_queue_seconds", "Time in placement.", _QUEUE_S)
        self._decision = Histogram("warmroute_decision_seconds", "Time to decide.", _DECISION_S, label=None)
        self._decisions = self._decision.buckets("")
        self._lag = Histogram("warmroute_loop_lag_seconds", "How late the event loop runs.", _LAG_S, label=None)

    def observe(self, outcome: Outcome) -> None:
        """A request has ended. Many are counted at once: 1.2 µs each in a row, 3.6 µs one by one under load."""
        self._recent.append(outcome)
        self._uncounted.append(outcome)
        if len(self._uncounted) >= _COUNTED_AT_ONCE:
            self._count_all()

    def _count_all(self) -> None:
        outcomes, self._uncounted = self._uncounted, []
        for outcome in outcomes:
            self._count(outcome)

    def _count(self, outcome: Outcome) -> None:
        kind = (
            outcome.model, outcome.instance, outcome.status, outcome.finish, outcome.error,
            outcome.prompt_source, outcome.delivered_source,
        )  # fmt: skip
        series = self._series.get(kind)
        if series is None:
            series = self._find_series(kind, outcome)
        for cell in series.cells:
            cell.count += 1
        series.duration.add(outcome.took_s)
        if outcome.attempts > 1:
            self._retries.cell((outcome.model,)).count += outcome.attempts - 1
        if outcome.resumed:
            self._resumed.cell((outcome.model, outcome.finish)).count += 1
        if series.placed is not None:
            tokens, queue = series.placed
            tokens.add(outcome)
            queue.add(outcome.queue_s)
            if outcome.ttft_s is not None:
                self._observe_stream(outcome, outcome.ttft_s)

    def _observe_stream(self, outcome: Outcome, ttft_s: float) -> None:
        self._ttft.observe(ttft_s, outcome.model)
        usage = outcome.usage
        if usage is not None and usage.output_tokens > 1:
            self._tpot.observe((outcome.took_s - ttft_s) / (usage.output_tokens - 1), outcome.model)

    def _find_series(self, kind: tuple[object, ...], outcome: Outcome) -> _Series:
        model, instance = outcome.model, outcome.instance
        cells = [self._requests.cell((model, outcome.finish, str(outcome.status)))]
        if outcome.error:
            cells.append(self._errors.cell((model, outcome.error)))
        placed = None
        if instance is not None:
            cells.append(self._prompts.cell((model, outcome.prompt_source)))
            cells.append(self._delivered.cell((model, outcome.delivered_source)))
            tokens = self._tokens.get((model, instance)) or self._begin_tokens(model, instance)
            placed = (tokens, self._queue.buckets(model))
        if len(self._series) >= _SERIES:
            self._series.clear()  # found again as they come
        series = self._series[kind] = _Series(cells, self._duration.buckets(model), placed)
        return series

    def _begin_tokens(self, model: str, instance: str) -> _Tokens:
        key = (model, instance) if len(self._tokens) < _SERIES else (_OTHER, _OTHER)
        return self._tokens.setdefault(key, _Tokens())

    def fault(self, model: str, fault: str) -> None:
        """An engine has failed an attempt (`serving/failover.py`)."""
        self._faults.cell((model, fault)).count += 1

    def decided(self, took_us: float) -> None:
        """A placement decision has been made."""
        self._decisions.add(took_us * 1e-6)

    def recent(self, request_id: str | None = None) -> list[dict[str, Any]]:
        """The last outcomes, newest first, or those of one id."""
        outcomes = [o for o in reversed(self._recent) if request_id is None or o.request_id == request_id]
        return [msgspec.to_builtins(outcome) | {"caller": _shown(outcome.caller)} for outcome in outcomes]

    async def sample_lag(self) -> None:
        """Measures the event loop until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_SAMPLE_S
            await asyncio.sleep(_LAG_SAMPLE_S)
            late = max(0.0, loop.time() - due)
            self._lag.observe(late)
            self._lag_max = max(self._lag_max, late)

    async def page(self) -> bytes:
        """The metrics page in Prometheus text format, written in a thread."""
        self._count_all()
        lag_max, self._lag_max = self._lag_max, 0.0
        rows = await in_slices(self._fleet())
        ready = [
            _lag_max(lag_max),
            *self._feed_counts(),
            *self._token_counts(),
            *self._tools_order(),
            *self._room_figures(),
            *_shadow_counts(self._shadows()),
            *_isolation_gauges(self._isolation()),
            _connection_counts(self._connections()),
            _refused_counts(self._refused()),
            *self._caller_figures(),
            *_figures("ledger", self._ledger(), _LEDGER),
            *_limit_figures(self._limits()),
        ]
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Page(ready, self._families(), rows))
        ProcessCollector(namespace="warmroute", registry=registry)
        return await asyncio.to_thread(generate_latest, registry)

    def _families(self) -> list[Counts | Histogram]:
        return [value for value in vars(self).values() if isinstance(value, (Counts, Histogram))]

    def _token_counts(self) -> Iterator[Metric]:
        for attribute, (name, help_text) in _TOKEN_COUNTS.items():
            family = CounterMetricFamily(name, help_text, labels=["model", "instance"])
            for key, tokens in self._tokens.items():
                family.add_metric(key, getattr(tokens, attribute))
            yield family

    def _feed_counts(self) -> Iterator[Metric]:
        for name, count in self._feed().items():
            yield CounterMetricFamily(f"warmroute_kv_{name}", f"KV event feed: {name.replace('_', ' ')}.", value=count)

    def _room_figures(self) -> Iterator[Metric]:
        return _figures("room", self._room(), _ROOM)

    def _caller_figures(self) -> Iterator[Metric]:
        for name, value in self._callers().items():
            yield GaugeMetricFamily(f"warmroute_{name}", _CALLERS[name], value=value)
        family = CounterMetricFamily(
            "warmroute_unauthenticated", "Requests whose caller was not let in.", labels=["code"]
        )
        for code, count in self._strangers().items():
            family.add_metric([code], count)
        yield family

    def _tools_order(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "warmroute_tools_key_order",
            "Requests whose tools are others in another order.",
            labels=["model"],
        )
        for model, count in self._reordered_tools().items():
            family.add_metric([model], count)
        yield family


def _shown(caller: Caller) -> dict[str, str]:
    """Who it was, without the salt that keeps their cache apart."""
    return {name: getattr(caller, name) for name in ("tenant", "project", "key", "domain")}


async def in_slices(rows: Iterable[Row]) -> list[Row]:
    """All of them, with a turn for the loop after every few."""
    made: list[Row] = []
    for row in rows:
        made.append(row)
        if not len(made) % _ROWS_AT_ONCE:
            await asyncio.sleep(0)
    return made


def _lag_max(seconds: float) -> Metric:
    return GaugeMetricFamily("warmroute_loop_lag_max_seconds", "Worst since the last page.", value=seconds)


def _connection_counts(stats: Mapping[str, PoolStats]) -> Metric:
    family = CounterMetricFamily(
        "warmroute_engine_connections",
        "Connections to an engine. retried: requests sent again, since a kept connection had died before any answer.",
        labels=["instance", "event"],
    )
    for instance, counts in stats.items():
        for event in ("opened", "reused", "retried", "unreachable"):
            family.add_metric([instance, event], getattr(counts, event))
    return family


def _figures(group: str, values: Mapping[str, float], texts: Mapping[str, str]) -> Iterator[Metric]:
    """Those whose name ends in _total only ever grow."""
    for name, value in values.items():
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        yield kind(f"warmroute_{group}_{name.removesuffix('_total')}", texts[name], value=value)


def _refused_counts(refused: Mapping[int, int]) -> Metric:
    family = CounterMetricFamily(
        "warmroute_http_refused", "Requests that were no valid HTTP, too large or too slow.", labels=["status"]
    )
    for status, count in sorted(refused.items()):
        family.add_metric([str(status)], count)
    return family


def _limit_figures(figures: Mapping[str, float]) -> Iterator[Metric]:
    if not figures:
        return
    mode = GaugeMetricFamily(
        "warmroute_limiter_mode",
        "1: how limits are counted. memory: here. redis: for all gateways. local: Redis is away, by without_redis.",
        labels=["mode"],
    )
    refused = CounterMetricFamily("warmroute_limiter_refused", "Requests refused by a limit.", labels=["code"])
    for name, value in figures.items():
        if name.startswith("mode_"):
            mode.add_metric([name.removeprefix("mode_")], value)
        elif name.startswith("refused_"):
            refused.add_metric([name.removeprefix("refused_").removesuffix("_total")], value)
        else:
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield kind(f"warmroute_limiter_{name.removesuffix('_total')}", _LIMITER[name], value=value)
    yield from (mode, refused)


def _shadow_counts(shadows: Mapping[str, Mapping[str, float]]) -> Iterator[Metric]:
    if not shadows:
        return
    decisions = CounterMetricFamily(
        "warmroute_shadow_decisions",
        "Decisions scored by a policy that does not act. agrees: whether it would have been content with the choice.",
        labels=["policy", "agrees"],
    )
    regret = CounterMetricFamily(
        "warmroute_shadow_regret",
        "Sum of its cost of what was chosen less its cost of its own choice, in ms or the unit of its costs.",
        labels=["policy"],
    )
    errors = CounterMetricFamily("warmroute_shadow_errors", "Decisions it could not be asked about.", labels=["policy"])
    for policy, counts in shadows.items():
        decisions.add_metric([policy, "yes"], counts["agreed"])
        decisions.add_metric([policy, "no"], counts["differed"])
        regret.add_metric([policy], counts["regret"])
        errors.add_metric([policy], counts["errors"])
    yield from (decisions, regret, errors)


def _isolation_gauges(figures: Mapping[str, Mapping[str, float]]) -> Iterator[Metric]:
    for name, values in figures.items():
        label, help_text = _ISOLATION[name]
        family = GaugeMetricFamily(f"warmroute_isolation_{name}", help_text, labels=[label])
        for of, value in values.items():
            family.add_metric([of], value)
        yield family


def _rank_gauges(rows: Sequence[Row]) -> Iterator[Metric]:
    for name, help_text in _RANK_GAUGES.items():
        family = GaugeMetricFamily(f"warmroute_rank_{name}", help_text, labels=["model", "instance", "rank"])
        for row in rows:
            if row.get(name) is not None:
                family.add_metric([row.get("model", ""), row["instance"], str(row["rank"])], row[name])
        yield family


class _Page(Collector):
    """`rows`: one a rank, already copied: everything here is read in the thread that writes the page."""

    def __init__(self, ready: list[Metric], families: list[Counts | Histogram], rows: Sequence[Row]) -> None:
        self._ready = ready
        self._families = families
        self._rows = rows

    def collect(self) -> Iterator[Metric]:
        yield from self._ready
        yield from _rank_gauges(self._rows)
        for family in self._families:
            yield family.metric()


def log_access(outcome: Outcome, client: Client) -> None:
    """A line a request: JSON on the logger `warmroute.access`, never a prompt or a key."""
    usage = outcome.usage
    line = {
        "at": round(outcome.started_at, 3),
        "request_id": outcome.request_id,
        "client": client.address,
        "tenant": outcome.caller.tenant or None,
        "key": outcome.caller.key or None,
        "scheme": client.scheme or None,
        "model": outcome.model,
        "status": outcome.status,
        "finish": outcome.finish,
        "error": outcome.error,
        "instance": outcome.instance,
        "rank": outcome.rank,
        "stream": outcome.stream,
        "input_tokens": outcome.input_tokens,
        "predicted_hit_tokens": outcome.predicted_hit_tokens,
        "delivered_hit_tokens": outcome.delivered_hit_tokens,
        "output_tokens": usage.output_tokens if usage is not None else None,
        "ttft_s": outcome.ttft_s,
        "took_s": round(outcome.took_s, 6),
    }
    _access.info(msgspec.json.encode(line).decode())
