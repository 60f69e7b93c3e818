"""Do simulated engine servers in real time and the replay in virtual time agree?

python -m tests.bench.agreement [--trace FILE] [--engines N] [--seconds N] [--runs N]

The same requests on both sides: streamed through the gateway to engine servers, each at its time; and replayed.
Policy (kv_aware), waiting room, profile, capacity and block size are the same. FILE is a trace of Mooncake's format; by
default conversations are made up. As many of its first requests are taken, squeezed or stretched in time, as keep the
engines busy with prefill for LOAD of the time if caches never forgot anything. Decoding comes on top, so lines form.

Some milliseconds decide who goes where, and from there on two runs differ. So the baseline is the median of several
replays, each begun at another moment between two load reports and with every arrival up to 5 ms late. The range of
those is shown beside it: real time can agree no better with virtual time than virtual time does with itself. Of several
real runs (`--runs`, 70 s each) the median is shown, and their range.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import msgspec
import orjson
import uvloop

from router.errors import EngineError
from router.http.client import Pool
from router.http.messages import Header
from router.lab.arms import parse_arm
from router.lab.chat import ChatModel
from router.lab.compare import compare
from router.lab.fleet_model import EngineSpec
from router.lab.measures import measure, quantile
from router.lab.profiles import PROFILES
from router.lab.replay import Replayed, Served, Setup
from router.lab.traces import Trace, TraceError, TraceRequest, read_trace
from tests.bench.processes import GATEWAY_CORE, LOAD_CORE, PORT, Measured, gateway, running, wait_for
from tests.bench.table import Row, report

TAKES_S = 85
LOAD = 0.65
PROFILE = PROFILES["llama-3.1-70b-tp4-h100"]  # slow: a second of its time costs servers in Python little of theirs
POLICY = "kv_aware"
REPLAYS = 15
LOAD_REPORTS_EVERY_S = 1.0
LATE_S = 0.005
MADE_UP = 10_000
BLOCK = 512
MODEL = "demo"
FIRST_PORT = 9150
_HEADERS: list[Header] = [(b"content-type", b"application/json")]
_CACHED = re.compile(rb'"cached_tokens":(\d+)')
_USAGE_BYTES = 1_024  # the last of an answer, usage among them


class Quantity(NamedTuple):
    label: str
    unit: str
    scale: float = 1.0
    target: str = ""


QUANTITIES = {
    "hit_rate": Quantity("hit rate", "%", 1e2, "within 1 point"),
    "ttft_mean_s": Quantity("mean ttft", "ms", 1e3, "within 10 %"),
    "ttft_p50_s": Quantity("ttft p50", "ms", 1e3),
    "ttft_p90_s": Quantity("ttft p90", "ms", 1e3),
    "in_engine_mean_s": Quantity("mean ttft, of that in the engine", "ms", 1e3),
    "tpot_mean_ms": Quantity("mean tpot", "ms"),
    "goodput": Quantity("goodput (2 s, 100 ms)", "%", 1e2),
    "imbalance": Quantity("uncached tokens: busiest engine over mean", "×"),
}


def run(trace: str | None = None, engines: int = 4, seconds: float = 60.0, runs: int = 1) -> dict[str, Any]:
    if engines < 1 or runs < 1 or not 0 < seconds < math.inf:
        sys.exit("at least one engine, one run, and some seconds")
    chosen = segment(_read(trace), engines, seconds)
    sent = bodies(chosen)
    real = [_real_time(chosen, sent, engines) for _ in range(runs)]
    virtual = [_virtual_time(_begun_at_another_moment(chosen, seed), engines) for seed in range(REPLAYS)]
    return {
        "trace": chosen.name,
        "engines": engines,
        "requests": len(chosen.requests),
        "input_tokens_mean": mean(request.input_tokens for request in chosen.requests),
        "output_tokens_mean": mean(request.output_tokens for request in chosen.requests),
        "arrive_in_s": chosen.requests[-1].at,
        "real": real,
        "virtual": virtual,
    }


# -- the requests


def _read(path: str | None) -> Trace:
    if path is None:
        return conversations()
    try:
        return read_trace(path, format="mooncake")
    except TraceError as error:
        sys.exit(str(error))
    except OSError as error:
        sys.exit(f"{path}: {error.strerror}")


def conversations(seed: int = 1) -> Trace:
    """Half of the turns go on where another ended; one arrives a second. About 6,000 tokens in and 120 out.

    Mooncake's conversations are longer, but then a run of a minute has so few that a single one decides the figures.
    """
    dice = random.Random(seed)
    names = iter(range(1 << 60))
    open_turns: list[list[int]] = []
    requests: list[TraceRequest] = []
    at = 0.0
    for number in range(MADE_UP):
        at += dice.expovariate(1.0)
        known = open_turns.pop(dice.randrange(len(open_turns))) if open_turns and dice.random() < 0.5 else []
        blocks = [*known, *(next(names) for _ in range(_lognormal(dice, 1.5, 0.8, most=60)))]
        if len(blocks) < 60:
            open_turns.append(blocks)
        tokens = len(blocks) * BLOCK - dice.randrange(BLOCK)
        requests.append(TraceRequest(str(number), at, tokens, _lognormal(dice, 4.6, 0.7, most=2_000), blocks))
    return Trace("conversations", BLOCK, requests)


def _lognormal(dice: random.Random, mu: float, sigma: float, *, most: int) -> int:
    return min(most, max(1, round(dice.lognormvariate(mu, sigma))))


def segment(trace: Trace, engines: int, seconds: float) -> Trace:
    """The trace's first requests, in so much time that prefill alone takes LOAD of it. A short trace takes less."""
    work_s, enough_s = 0.0, LOAD * engines * seconds
    seen: set[int] = set()
    chosen: list[TraceRequest] = []
    for request in trace.requests:
        tokens = request.input_tokens
        new = sum(block not in seen for block in request.blocks) * trace.block_size
        seen.update(request.blocks)
        chosen.append(request)
        work_s += PROFILE.rates.prefill_ms(min(new, tokens), tokens) / 1e3
        if work_s >= enough_s:
            break
    start, lasts_s = chosen[0].at, chosen[-1].at - chosen[0].at
    pace = work_s / (LOAD * engines * lasts_s) if lasts_s else 1.0
    moved = [msgspec.structs.replace(request, at=(request.at - start) * pace) for request in chosen]
    return Trace(trace.name, trace.block_size, moved)


def _begun_at_another_moment(trace: Trace, seed: int) -> Trace:
    dice = random.Random(seed)
    begun = dice.random() * LOAD_REPORTS_EVERY_S
    moved = [
        msgspec.structs.replace(request, at=begun + request.at + dice.random() * LATE_S) for request in trace.requests
    ]
    return Trace(trace.name, trace.block_size, sorted(moved, key=lambda request: request.at))


def bodies(trace: Trace) -> list[bytes]:
    """What clients send. Equal names of blocks become equal token ids."""
    vocabulary = range(ChatModel().vocabulary_size)
    by_name: dict[int, list[int]] = {}
    made = []
    for request in trace.requests:
        ids: list[int] = []
        for name in request.blocks:
            if name not in by_name:
                by_name[name] = random.Random(name).choices(vocabulary, k=trace.block_size)
            ids += by_name[name]
        body = {"model": MODEL, "prompt": ids[: request.input_tokens], "max_tokens": request.output_tokens}
        options = {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        made.append(orjson.dumps({**body, **options}))
    return made


# -- virtual time


def _virtual_time(trace: Trace, engines: int) -> dict[str, float]:
    """With the replay's own delays.

    There the end of a prefill is known by its KV event after 5 ms. In real time it is known after 2 ms, but then it
    takes about 5 until the engine has read the next prompt: between prefills there is about as long a pause.
    """
    setup = Setup(engines=[EngineSpec(PROFILE)] * engines)
    replayed = compare(trace, [parse_arm(POLICY)], setup)[0].replayed
    uncached = [0] * engines
    in_engine = []
    for one in replayed.served:
        if one.first_token_at is not None and one.placed_at is not None:
            uncached[one.engine] += one.input_tokens - one.hit_tokens
            in_engine.append(one.first_token_at - one.placed_at)
    return _figures(replayed, in_engine_s=mean(in_engine), uncached=uncached)


def _figures(replayed: Replayed, *, in_engine_s: float, uncached: Sequence[float]) -> dict[str, float]:
    found = msgspec.to_builtins(measure(replayed))
    found |= {"in_engine_mean_s": in_engine_s, "imbalance": max(uncached) / mean(uncached)}
    return {name: found[name] for name in (*QUANTITIES, "refused")}


# -- real time


class Answer:
    """A receiver (`router.http.client`) that notes what a client sees. Times of the loop's clock."""

    def __init__(self, due: float, sent_at: float) -> None:
        self.due = due
        self.sent_at = sent_at
        self.first_token_at: float | None = None
        self.ended_at: float | None = None
        self.status = 0
        self.cached_tokens = 0
        self.done = asyncio.Event()
        self._clock = asyncio.get_running_loop().time
        self._last = b""

    def on_head(self, status: int, headers: list[Header]) -> None:
        self.status = status

    def on_data(self, data: bytes) -> None:
        if self.first_token_at is None and self.status == 200:
            self.first_token_at = self._clock()  # the first event of a text completion is a token
        self._last = (self._last + data)[-_USAGE_BYTES:]

    def on_end(self) -> None:
        self.ended_at = self._clock()
        usage = _CACHED.search(self._last)
        if usage is None and self.status == 200:
            self.status = 502  # an answer without usage broke off
        self.cached_tokens = int(usage[1]) if usage is not None else 0
        self.done.set()

    def on_error(self, error: EngineError) -> None:
        self.status = error.status
        self.done.set()


def _real_time(trace: Trace, sent: Sequence[bytes], engines: int) -> dict[str, float]:
    """What clients saw, and what it cost the machine: of the gateway that is relay and brain, without the admin."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {LOAD_CORE})
    try:
        with contextlib.ExitStack() as stack:
            servers = [stack.enter_context(_engine(n, trace.block_size)) for n in range(engines)]
            front = stack.enter_context(gateway(engines=_configured(engines), model=MODEL, policy=POLICY))
            began, spent = time.monotonic(), _cpu_s(front, servers)
            answers = uvloop.run(_drive(trace, sent))
            if all(answer.first_token_at is None for answer in answers):
                sys.exit(f"not one request was answered; the first: {answers[0].status}")
            took = time.monotonic() - began
            cores = {f"cores_{name}": (cpu_s - spent[name]) / took for name, cpu_s in _cpu_s(front, servers).items()}
            counters = [_counters(n) for n in range(engines)]
    finally:
        os.sched_setaffinity(0, before)
    ttft = "vllm:time_to_first_token_seconds"
    late = quantile(sorted(answer.sent_at - answer.due for answer in answers), 0.99)
    return {
        **_figures(
            _as_replayed(trace, answers, engines),
            in_engine_s=sum(c[f"{ttft}_sum"] for c in counters) / sum(c[f"{ttft}_count"] for c in counters),
            uncached=[c["vllm:prompt_tokens_total"] - c["vllm:prompt_tokens_cached_total"] for c in counters],
        ),
        **cores,
        "sent_late_p99_s": late or 0.0,
        "load_average": os.getloadavg()[0],
    }


@contextlib.contextmanager
def _engine(number: int, block_size: int) -> Iterator[Measured]:
    port = FIRST_PORT + number
    command = ["router", "sim-engine", "--port", str(port), "--profile", PROFILE.name, "--model", MODEL]
    core = (LOAD_CORE, GATEWAY_CORE)[number % 2]
    with (
        tempfile.TemporaryDirectory() as folder,
        running([*command, "--block-size", str(block_size)], core=core, log=Path(folder) / "log") as measured,
    ):
        wait_for(f"http://127.0.0.1:{port}/health", measured)
        yield measured


def _configured(engines: int) -> list[dict[str, Any]]:
    urls = [f"http://127.0.0.1:{FIRST_PORT + n}" for n in range(engines)]
    return [{"url": url, "kind": "vllm", "rates": PROFILE.name} for url in urls]


async def _drive(trace: Trace, sent: Sequence[bytes]) -> list[Answer]:
    pool = Pool(f"http://127.0.0.1:{PORT}")
    clock = asyncio.get_running_loop().time
    start = clock() + 0.5
    answers = []
    for request, body in zip(trace.requests, sent, strict=True):
        due = start + request.at
        await asyncio.sleep(max(0.0, due - clock()))
        answer = Answer(due, clock())
        pool.send(b"POST", b"/v1/completions", _HEADERS, body, answer)
        answers.append(answer)
    for answer in answers:
        await answer.done.wait()
    await pool.aclose()
    return answers


def _as_replayed(trace: Trace, answers: Sequence[Answer], engines: int) -> Replayed:
    """What clients saw, to be measured as a replay is. What they did not see is left out."""
    served = []
    for request, answer in zip(trace.requests, answers, strict=True):
        tokens = request.input_tokens
        served.append(
            Served(
                request.id,
                request.tenant,
                request.turn,
                answer.due,
                tokens,
                request.output_tokens,
                (PROFILE.rates.c0_ms + PROFILE.rates.prefill_ms(tokens, tokens)) / 1e3,
                first_token_at=answer.first_token_at,
                finished_at=answer.ended_at,
                hit_tokens=answer.cached_tokens,
                refused="" if answer.status == 200 else str(answer.status),
            )
        )
    ended_at = max(answer.ended_at or answer.due for answer in answers)
    return Replayed(POLICY, served, ended_at, [0.0] * engines, 0, 0.0, None)


def _cpu_s(front: Measured, servers: Sequence[Measured]) -> dict[str, float]:
    return {"gateway": front.cpu_s, "engines": sum(server.cpu_s for server in servers), "load": time.process_time()}


def _counters(number: int) -> dict[str, float]:
    """An engine's metrics by name."""
    page = urllib.request.urlopen(f"http://127.0.0.1:{FIRST_PORT + number}/metrics", timeout=10).read().decode()
    lines = [line for line in page.splitlines() if not line.startswith("#")]
    return {line.partition("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def rows(figures: dict[str, Any]) -> Iterator[Row]:
    real, virtual = figures["real"], figures["virtual"]
    yield Row(f"requests ({figures['trace']})", figures["requests"], "")
    yield Row("tokens in", figures["input_tokens_mean"], "", figures["output_tokens_mean"], "tokens out")
    yield Row("arrive in", figures["arrive_in_s"], "s")
    for name, (label, unit, scale, target) in QUANTITIES.items():
        seen, again = (sorted(one[name] * scale for one in side) for side in (real, virtual))
        each = f" ({_range(seen)})" if len(seen) > 1 else ""
        yield Row(label + each, median(seen), unit, median(again), f"virtual time: {_range(again)}", target)
    yield Row("failed", sum(one["refused"] for one in real), "", target="0")
    parts = ("gateway", "engines", "load")
    yield Row("cores used", max(sum(one[f"cores_{part}"] for part in parts) for one in real), "", target="≤ 1.2 of 2")
    for part in parts:
        yield Row(f"  by the {part}", max(one[f"cores_{part}"] for one in real), "")
    yield Row("sent late, p99", max(one["sent_late_p99_s"] for one in real) * 1e3, "ms")
    yield Row("load average at the end", max(one["load_average"] for one in real), "")


def _range(ordered: Sequence[float]) -> str:
    return f"{ordered[0]:.4g} to {ordered[-1]:.4g}"


if __name__ == "__main__":
    report(__doc__, run, rows)
