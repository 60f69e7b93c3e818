"""What it costs to place a request: four engines, a prompt of 16 blocks, against a bare pick of the least in flight.

python -m tests.bench.place
"""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

from policies.kv_aware import KvAware
from router.core import Ask, Booking, EngineFacts, EventSource, Instance, Outcome, Prompt, Stored
from router.routing.blocks import chain, root_key
from router.routing.bookings import Bookings
from router.routing.brain import Brain, Placed
from router.routing.confidence import Confidence
from router.routing.fleet import Fleet, Health
from router.routing.index import BlockIndex
from router.routing.recent import RecentDispatches
from router.routing.sent import SentIndex
from tests.bench.table import Row, report

TAKES_S = 3
BLOCK = 16


def fleet_and_brain(engines: int) -> tuple[Fleet, Brain, BlockIndex]:
    clock = time.monotonic
    fleet, index = Fleet(), BlockIndex(b"secret", clock=clock)
    for number in range(engines):
        name = f"engine-{number}"
        source = EventSource(0, f"tcp://{name}:5557")
        facts = EngineFacts(served=("m",), block_size=BLOCK, capacity_tokens=400_000, sources=(source,))
        fleet.add(Instance(name, f"http://{name}:8000", "vllm", "m"), now=clock())
        fleet.learn(name, facts, now=clock())
        fleet.set_health(name, Health.READY, "", now=clock())
        (rank,) = fleet.ranks(name)
        rank.slot = index.open(name, 0, model="m", block_size=BLOCK)
        rank.confidence = Confidence(clock=clock)
    brain = Brain(
        fleet=fleet,
        index=index,
        sent=SentIndex(index, clock=clock),
        recent=RecentDispatches(clock=clock),
        bookings=Bookings[Placed](),
        policies={"kv_aware": KvAware({}, random.Random(1))},
        default_policy="kv_aware",
        clock=clock,
        dice=random.Random(1),
    )
    return fleet, brain, index


def ask_of(number: int, blocks: int) -> Ask:
    tokens = [number % 50_000, *range(1, blocks * BLOCK)]
    keys = chain(root_key(b"secret", "m", None, None), array("I", tokens), BLOCK)
    return Ask(f"r{number}", "m", Prompt(len(tokens) + 5, len(tokens) + 5, {BLOCK: keys}), tenant="acme", domain="acme")


def outcome_of(ask: Ask) -> Outcome:
    return Outcome(
        ask.request_id, "m", "acme", "engine-0", 0, 200, "complete", None, ask.prompt.tokens, 0, 0, None, "none",
        0.0, 0.0, 0.02, 0.5, True,
    )  # fmt: skip


def place_us(engines: int = 4, blocks: int = 16, rounds: int = 4000) -> dict[str, float]:
    """Median of ten runs: place, first token and release, in µs a request."""
    fleet, brain, index = fleet_and_brain(engines)
    asks = [ask_of(number, blocks) for number in range(rounds)]
    for number, rank in enumerate(fleet):
        assert rank.slot is not None
        tokens = [7, *range(1, blocks * BLOCK)]
        index.apply(rank.slot, Stored(list(range(1, blocks + 1))[: 1 + number * blocks // engines], None,
                                      tokens[: (1 + number * blocks // engines) * BLOCK], BLOCK))  # fmt: skip
    step = rounds // 10
    place: list[float] = []
    rest: list[float] = []
    for first in range(0, rounds, step):
        batch = asks[first : first + step]
        place.append(_each_us(lambda batch=batch: [brain.place_now(ask) for ask in batch], step, into := []))
        booked = [(booking.id, outcome_of(ask)) for booking, ask in zip(into[0], batch, strict=True)]
        rest.append(_each_us(lambda booked=booked: [_finish(brain, *one) for one in booked], step, []))
    return {"place": median(place), "progress_and_release": median(rest)}


def in_a_row_us(*, room: bool, rounds: int = 4000) -> float:
    """Place, first token and release one after the other on four idle engines: nobody ever waits."""
    _, brain, _ = fleet_and_brain(4)
    if room:
        brain.open_room(lambda _when, _call: None)
    asks = [ask_of(number, 16) for number in range(rounds)]
    step = rounds // 10

    def work(batch: list[Ask]) -> None:
        for ask in batch:
            booking = brain.place_now(ask)
            assert isinstance(booking, Booking), "there is room"
            _finish(brain, booking.id, outcome_of(ask))

    return median(_each_us(partial(work, asks[n : n + step]), step, []) for n in range(0, rounds, step))


def _finish(brain: Brain, booking: int, outcome: Outcome) -> None:
    brain.progress(booking)
    brain.release(booking, outcome)


def _each_us(work: Callable[[], Any], count: int, into: list[Any]) -> float:
    began = time.perf_counter()
    into.append(work())
    return (time.perf_counter() - began) / count * 1e6


def bare_us(engines: int = 4, rounds: int = 40_000) -> float:
    """The least a router can do: the engine with the fewest requests in flight, counted up and down."""
    inflight = {f"engine-{number}": 0 for number in range(engines)}

    def work() -> None:
        for _ in range(rounds):
            chosen = min(inflight, key=inflight.__getitem__)
            inflight[chosen] += 1
            inflight[chosen] -= 1

    return median(_each_us(work, rounds, []) for _ in range(5))


def run() -> dict[str, float]:
    bare = bare_us()
    four = place_us()
    many = place_us(engines=32, blocks=64, rounds=1000)
    return {
        "bare_least_inflight_us": round(bare, 2),
        "place_4x16_us": round(four["place"], 1),
        "progress_and_release_us": round(four["progress_and_release"], 1),
        "place_over_bare": round(four["place"] / bare, 1),
        "place_32x64_us": round(many["place"], 1),
        "coroutine_us": round(_coroutine_us(), 2),
        "in_a_row_us": round(in_a_row_us(room=False), 1),
        "in_a_row_with_room_us": round(in_a_row_us(room=True), 1),
    }


def _coroutine_us(rounds: int = 20_000) -> float:
    """What it costs that `place` is a coroutine."""

    async def nothing() -> None:
        return None

    async def work() -> float:
        began = time.perf_counter()
        for _ in range(rounds):
            await nothing()
        return (time.perf_counter() - began) / rounds * 1e6

    return asyncio.run(work())


def rows(figures: dict[str, float]) -> Iterator[Row]:
    bare = figures["bare_least_inflight_us"]
    for name, label in LABELS.items():
        yield Row(label, figures[name], "µs", bare, "pick of the least in flight")
    without, within = figures["in_a_row_us"], figures["in_a_row_with_room_us"]
    yield Row("place, first token, release, with a waiting room nobody needs", within, "µs", without, "without one")


LABELS = {
    "place_4x16_us": "place: 4 engines, 16 blocks",
    "place_32x64_us": "place: 32 engines, 64 blocks",
    "progress_and_release_us": "first token and release",
    "coroutine_us": "that place is a coroutine",
}


if __name__ == "__main__":
    report(__doc__, run, rows)
