"""The /metrics page of the simulated engine, under vLLM's names."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping

from router.lab.engine import EngineModel

# Upper bounds as vLLM 0.32 has them.
_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
_STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)

SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
_FINISH_REASONS = ("stop", "length", "abort", "error")


class Histogram:
    """Counts under upper bounds, as Prometheus wants them."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def lines(self, name: str, labels: str) -> list[str]:
        lines, total = [], 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {float(total)}')
        return [*lines, f"{name}_count{{{labels}}} {float(total)}", f"{name}_sum{{{labels}}} {self._sum}"]


class EngineMetrics:
    """What the server counts; gauges are read from the model when the page is made."""

    def __init__(self, model_name: str, *, started_at: float) -> None:
        self._labels = f'engine="0",model_name="{_escaped(model_name)}"'
        self._started_at = started_at
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter()
        self.rejected = 0  # the queue was full
        self.sleep_state = "awake"
        self.ttft_s = Histogram(_TTFT)
        self.inter_token_s = Histogram(_ITL)
        self.latency_s = Histogram(_LATENCY)
        self.step_tokens = Histogram(_STEP_TOKENS)

    def page(self, model: EngineModel, cache_config: Mapping[str, str]) -> bytes:
        own = self._labels
        lines = [
            *_family("process_start_time_seconds", "gauge", [("", self._started_at)]),
            *_family("vllm:num_requests_running", "gauge", [(own, model.running)]),
            *_family("vllm:num_requests_waiting", "gauge", [(own, model.waiting)]),
            *_family("vllm:num_requests_waiting_by_reason", "gauge", self._by("reason", {"capacity": model.waiting})),
            *_family("vllm:engine_sleep_state", "gauge", self._by("sleep_state", self._sleep_states())),
            *_family("vllm:kv_cache_usage_perc", "gauge", [(own, model.kv_usage)]),
            *_family("vllm:prefix_cache_queries", "counter", [(own, model.queried_tokens)]),
            *_family("vllm:prefix_cache_hits", "counter", [(own, model.hit_tokens)]),
            *_family("vllm:num_preemptions", "counter", [(own, model.preemptions)]),
            *_family("vllm:prompt_tokens", "counter", [(own, self.prompt_tokens)]),
            *_family("vllm:prompt_tokens_cached", "counter", [(own, model.hit_tokens)]),
            *_family("vllm:generation_tokens", "counter", [(own, self.generation_tokens)]),
            *_family("vllm:request_success", "counter", self._by("finished_reason", self._finished())),
            *_family(
                "vllm:admission_rejections",
                "counter",
                [(f'{own.partition(",")[2]},reason="max_num_queued_reqs"', self.rejected)],
            ),
            *_family("vllm:cache_config_info", "gauge", [(_labels({**cache_config, "engine": "0"}), 1)]),
        ]
        for name, histogram in self._histograms().items():
            lines += [f"# TYPE {name} histogram", *histogram.lines(name, own)]
        return ("\n".join(lines) + "\n").encode()

    def _by(self, label: str, values: Mapping[str, float]) -> list[tuple[str, float]]:
        return [(f'{self._labels},{label}="{name}"', value) for name, value in values.items()]

    def _sleep_states(self) -> dict[str, float]:
        return {state: state == self.sleep_state for state in SLEEP_STATES}

    def _finished(self) -> dict[str, float]:
        return {reason: self.finished[reason] for reason in _FINISH_REASONS}

    def _histograms(self) -> dict[str, Histogram]:
        return {
            "vllm:time_to_first_token_seconds": self.ttft_s,
            "vllm:inter_token_latency_seconds": self.inter_token_s,
            "vllm:e2e_request_latency_seconds": self.latency_s,
            "vllm:iteration_tokens_total": self.step_tokens,
        }


def _family(name: str, kind: str, samples: list[tuple[str, float]]) -> list[str]:
    if kind == "counter":
        name += "_total"
    values = [f"{name}{{{labels}}} {float(value)}" if labels else f"{name} {float(value)}" for labels, value in samples]
    return [f"# TYPE {name} {kind}", *values]


def _labels(values: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(values.items()))


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
