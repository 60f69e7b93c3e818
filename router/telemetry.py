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

from router.core import Outcome, Usage

RECENT_OUTCOMES = 1000

_SERIES = 2000
_HISTOGRAMS = 200  # a histogram is some twenty series
_LAG_SAMPLE_S = 0.25
_OTHER = "other"

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

_TOKEN_COUNTS = {
    "input": ("warmroute_input_tokens", "Prompt tokens."),
    "told": ("warmroute_input_tokens_told", "Prompt tokens of answers that told their hit: what hits are a share of."),
    "output": ("warmroute_output_tokens", "Tokens generated."),
    "best_hit": ("warmroute_best_hit_tokens", "Hit tokens on the rank that held most."),
    "predicted_hit": ("warmroute_predicted_hit_tokens", "Hit tokens predicted for the rank that was chosen."),
    "delivered_hit": ("warmroute_delivered_hit_tokens", "Hit tokens the engine told of."),
}

_access = logging.getLogger("warmroute.access")


class Counts:
    """A counter by labels; at most `_SERIES` of them, then "other"."""

    __slots__ = ("_values", "help", "labels", "name")

    def __init__(self, name: str, help: str, labels: Sequence[str]) -> None:
        self.name = name
        self.help = help
        self.labels = labels
        self._values: dict[tuple[str, ...], int] = {}

    def add(self, key: tuple[str, ...], count: int = 1) -> None:
        values = self._values
        if key in values:
            values[key] += count
            return
        if len(values) >= _SERIES:
            key = (_OTHER,) * len(self.labels)
        values[key] = values.get(key, 0) + count

    def metric(self) -> Metric:
        family = CounterMetricFamily(self.name, self.help, labels=self.labels)
        for key, value in list(self._values.items()):
            family.add_metric(key, value)
        return family


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
        buckets = self._series.get(key)
        if buckets is None:
            buckets = self._begin(key)
        buckets.counts[bisect_left(self._bounds, value)] += 1
        buckets.total += value

    def _begin(self, key: str) -> _Buckets:
        if len(self._series) >= _HISTOGRAMS:
            key = _OTHER
        return self._series.setdefault(key, _Buckets(len(self._bounds) + 1))

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
    __slots__ = ("counts", "total")

    def __init__(self, size: int) -> None:
        self.counts = [0] * size
        self.total = 0.0


class _Tokens:
    """Token totals of one model on one instance."""

    __slots__ = ("best_hit", "delivered_hit", "input", "output", "predicted_hit", "told")

    def __init__(self) -> None:
        self.input = self.told = self.output = self.best_hit = self.predicted_hit = self.delivered_hit = 0

    def add(self, outcome: Outcome, usage: Usage | None) -> None:
        self.input += outcome.input_tokens
        self.best_hit += outcome.best_hit_tokens
        self.predicted_hit += outcome.predicted_hit_tokens
        if outcome.delivered_hit_tokens is not None:
            self.told += outcome.input_tokens
            self.delivered_hit += outcome.delivered_hit_tokens
        if usage is not None:
            self.output += usage.output_tokens


class Telemetry:
    """Give `observe` the outcomes; ask for `page`.

    fleet: one mapping a rank with "instance", "rank" and the values of `_RANK_GAUGES` (`core.Live.fleet`).
    feed: counts of the event feed by name; each becomes `warmroute_kv_{name}_total`.
    """

    def __init__(
        self,
        *,
        fleet: Callable[[], Iterable[Mapping[str, Any]]] = tuple,
        feed: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._fleet = fleet
        self._feed = feed
        self._recent: deque[Outcome] = deque(maxlen=RECENT_OUTCOMES)
        self._lag_max = 0.0
        self._requests = Counts("warmroute_requests", "Requests that ended.", ("model", "finish", "status"))
        self._errors = Counts("warmroute_errors", "Requests that ended with an error.", ("model", "error"))
        self._retries = Counts("warmroute_retries", "Further attempts at a request.", ("model",))
        self._prompts = Counts("warmroute_prompt_source", "How prompts were read.", ("model", "source"))
        self._delivered = Counts("warmroute_delivered_source", "Where hit counts came from.", ("model", "source"))
        self._tokens: dict[tuple[str, str], _Tokens] = {}
        self._ttft = Histogram("warmroute_ttft_seconds", "From the request to the first token of a stream.", _TTFT_S)
        self._tpot = Histogram("warmroute_tpot_seconds", "Time per further output token of a stream.", _TPOT_S)
        self._duration = Histogram("warmroute_request_duration_seconds", "From request to end.", _DURATION_S)
        self._queue = Histogram("warmroute_queue_seconds", "Time in placement.", _QUEUE_S)
        self._decision = Histogram("warmroute_decision_seconds", "Time to decide.", _DECISION_S, label=None)
        self._lag = Histogram("warmroute_loop_lag_seconds", "How late the event loop runs.", _LAG_S, label=None)

    def observe(self, outcome: Outcome) -> None:
        """A request has ended. Some microseconds."""
        model = outcome.model
        self._recent.append(outcome)
        self._requests.add((model, outcome.finish, str(outcome.status)))
        self._duration.observe(outcome.took_s, model)
        if outcome.error:
            self._errors.add((model, outcome.error))
        if outcome.attempts > 1:
            self._retries.add((model,), outcome.attempts - 1)
        if outcome.instance is not None:
            self._observe_placed(outcome, model, outcome.instance)

    def _observe_placed(self, outcome: Outcome, model: str, instance: str) -> None:
        usage = outcome.usage
        self._queue.observe(outcome.queue_s, model)
        self._prompts.add((model, outcome.prompt_source))
        self._delivered.add((model, outcome.delivered_source))
        tokens = self._tokens.get((model, instance)) or self._begin_tokens(model, instance)
        tokens.add(outcome, usage)
        if outcome.ttft_s is not None:
            self._ttft.observe(outcome.ttft_s, model)
            if usage is not None and usage.output_tokens > 1:
                self._tpot.observe((outcome.took_s - outcome.ttft_s) / (usage.output_tokens - 1), model)

    def _begin_tokens(self, model: str, instance: str) -> _Tokens:
        key = (model, instance) if len(self._tokens) < _SERIES else (_OTHER, _OTHER)
        return self._tokens.setdefault(key, _Tokens())

    def decided(self, took_us: float) -> None:
        """A placement decision has been made."""
        self._decision.observe(took_us * 1e-6)

    def recent(self, request_id: str | None = None) -> list[dict[str, Any]]:
        """The last outcomes, newest first, or those of one id."""
        outcomes = [o for o in reversed(self._recent) if request_id is None or o.request_id == request_id]
        return [msgspec.to_builtins(outcome) for outcome in outcomes]

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
        lag_max, self._lag_max = self._lag_max, 0.0
        registry = CollectorRegistry(auto_describe=False)
        ready = [*self._gauges(lag_max), *self._feed_counts(), *self._token_counts()]
        registry.register(_Page(ready, self._families()))
        ProcessCollector(namespace="warmroute", registry=registry)
        return await asyncio.to_thread(generate_latest, registry)

    def _families(self) -> list[Counts | Histogram]:
        return [value for value in vars(self).values() if isinstance(value, (Counts, Histogram))]

    def _gauges(self, lag_max: float) -> Iterator[Metric]:
        yield GaugeMetricFamily("warmroute_loop_lag_max_seconds", "Worst since the last page.", value=lag_max)
        rows = list(self._fleet())
        for name, help_text in _RANK_GAUGES.items():
            family = GaugeMetricFamily(f"warmroute_rank_{name}", help_text, labels=["model", "instance", "rank"])
            for row in rows:
                if row.get(name) is not None:
                    family.add_metric([row.get("model", ""), row["instance"], str(row["rank"])], row[name])
            yield family

    def _token_counts(self) -> Iterator[Metric]:
        for attribute, (name, help_text) in _TOKEN_COUNTS.items():
            family = CounterMetricFamily(name, help_text, labels=["model", "instance"])
            for key, tokens in self._tokens.items():
                family.add_metric(key, getattr(tokens, attribute))
            yield family

    def _feed_counts(self) -> Iterator[Metric]:
        for name, count in self._feed().items():
            yield CounterMetricFamily(f"warmroute_kv_{name}", f"KV event feed: {name.replace('_', ' ')}.", value=count)


class _Page(Collector):
    def __init__(self, ready: list[Metric], families: list[Counts | Histogram]) -> None:
        self._ready = ready
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._ready
        for family in self._families:
            yield family.metric()


def log_access(outcome: Outcome) -> None:
    """A listener for who wants a line a request: JSON on the logger `warmroute.access`, never a prompt or a key."""
    usage = outcome.usage
    line = {
        "at": round(outcome.started_at, 3),
        "request_id": outcome.request_id,
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
