"""Event streams over real sockets on loopback, on both event loops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq

from adapters._stream import Item
from adapters._zmq import Follower, new_context
from router.core import EventBatch, EventSource, Lost
from router.errors import EngineUnreachable
from tests.adapters.publisher import Publisher
from tests.adapters.wire import numbered


class Listener:
    """Reads a follower's items in the background of a test."""

    def __init__(self, items: AsyncGenerator[Item]) -> None:
        self._items = items
        self._seen: list[Item] = []
        self._grown = asyncio.Condition()
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for item in self._items:
            async with self._grown:
                self._seen.append(item)
                self._grown.notify_all()

    async def told(self, count: int) -> list[object]:
        """The next `count` items, in short: sequences, (kind, first, last), ("whole", seq)."""
        async with self._grown:
            await asyncio.wait_for(self._grown.wait_for(lambda: len(self._seen) >= count), 10)
        taken, self._seen = self._seen[:count], self._seen[count:]
        return [short(item) for item in taken]

    @property
    def unread(self) -> list[object]:
        return [short(item) for item in self._seen]

    async def aclose(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._items.aclose()


def short(item: Item) -> object:
    if isinstance(item, Lost):
        return (item.kind, item.first_seq, item.last_seq)
    return item.seq if item.events else ("whole", item.seq)


@asynccontextmanager
async def following(
    source: EventSource, after: int | None = None, *, timeout_s: float = 5.0, **options: int
) -> AsyncIterator[Listener]:
    context = new_context()
    follower = Follower(context, source, after, clock=asyncio.get_running_loop().time, timeout_s=timeout_s, **options)
    listener = Listener(follower.items())
    try:
        yield listener
    finally:
        await listener.aclose()
        context.term()  # would wait for ever for a socket left open


async def until_subscribed(publisher: Publisher, listener: Listener) -> None:
    """Publishes until a live batch gets through: a subscription takes effect some time after the connection."""
    start = len(publisher.published)
    while not listener.unread or not any(isinstance(item, int) and item >= start for item in listener.unread):
        await publisher.publish()
        await asyncio.sleep(0.02)
    count = len(publisher.published)
    if publisher.source.replay is not None:
        assert await listener.told(count) == list(range(count))
        return
    while await listener.told(1) != [count - 1]:
        pass


async def test_a_late_joiner_gets_everything_once_and_in_order() -> None:
    async with Publisher() as publisher:
        await publisher.publish(50)
        async with following(publisher.source) as listener:
            await until_subscribed(publisher, listener)
            await publisher.publish(20)
            start = len(publisher.published) - 20
            assert await listener.told(20) == list(range(start, start + 20))
            assert publisher.requests[0] == 0


@pytest.mark.parametrize("topic_in_replay", [True, False])
async def test_a_gap_is_replayed_with_one_request(topic_in_replay: bool) -> None:
    async with Publisher(topic_in_replay=topic_in_replay) as publisher, following(publisher.source) as listener:
        await until_subscribed(publisher, listener)
        publisher.requests.clear()
        start = len(publisher.published)
        await publisher.publish(5, lost=range(start, start + 4))
        assert await listener.told(5) == list(range(start, start + 5))
        assert publisher.requests == [start - 1]


async def test_a_hole_within_a_replay_is_asked_for_again() -> None:
    async with Publisher() as publisher, following(publisher.source) as listener:
        await until_subscribed(publisher, listener)
        publisher.requests.clear()
        start = len(publisher.published)
        publisher.left_out = {start + 2}
        await publisher.publish(5, lost=range(start, start + 4))
        assert await listener.told(5) == list(range(start, start + 5))
        assert publisher.requests == [start - 1, start + 2]


async def test_without_a_replay_socket_a_gap_is_lost() -> None:
    async with Publisher(replay=False) as publisher, following(publisher.source) as listener:
        await until_subscribed(publisher, listener)
        start = len(publisher.published)
        await publisher.publish(4, lost=(start, start + 1))
        assert await listener.told(3) == [("gap", start, start + 1), start + 2, start + 3]


async def test_a_replay_that_is_never_answered_ends() -> None:
    async with Publisher() as publisher, following(publisher.source, timeout_s=0.3) as listener:
        await until_subscribed(publisher, listener)
        publisher.is_mute = True
        start = len(publisher.published)
        await publisher.publish(2, lost=(start,))
        assert await listener.told(2) == [("gap", start, start), start + 1]


async def test_a_restart_of_an_idle_engine_is_noticed_and_read_from_the_first_batch() -> None:
    async with Publisher() as publisher, following(publisher.source) as listener:
        await until_subscribed(publisher, listener)
        await publisher.restart()
        assert await listener.told(2) == [("silent", None, None), ("restart", None, None)]
        await until_subscribed(publisher, listener)


async def test_a_lost_connection_to_the_same_process_is_made_good() -> None:
    async with Publisher() as publisher, following(publisher.source) as listener:
        await until_subscribed(publisher, listener)
        last = len(publisher.published) - 1
        await publisher.stop()
        await publisher.start()  # the ring lives on: as after a network failure
        assert await listener.told(2) == [("silent", None, None), ("whole", last)]
        await publisher.publish()
        assert await listener.told(1) == [last + 1]


async def test_ranks_are_independent() -> None:
    async with (
        Publisher(rank=0) as first,
        Publisher(rank=1) as second,
        following(first.source) as listener,
        following(second.source) as other,
    ):
        await until_subscribed(first, listener)
        await until_subscribed(second, other)
        await second.restart()
        assert await other.told(2) == [("silent", None, None), ("restart", None, None)]
        start = len(first.published)
        await first.publish(3)
        assert await listener.told(3) == [start, start + 1, start + 2]
        assert listener.unread == []


async def test_an_engine_that_is_not_there_is_silent_and_joins_when_it_appears() -> None:
    async with Publisher() as publisher:
        source = publisher.source
        await publisher.stop()
        async with following(source, timeout_s=0.2) as listener:
            assert await listener.told(1) == [("silent", None, None)]
            await publisher.start()
            await publisher.publish(3)
            assert await listener.told(3) == [0, 1, 2]


async def test_a_known_position_is_continued() -> None:
    async with Publisher() as publisher:
        await publisher.publish(10)
        async with following(publisher.source, 6) as listener:
            assert await listener.told(3) == [7, 8, 9]
            assert publisher.requests == [6]
        async with following(publisher.source, 9) as listener:
            assert await listener.told(1) == [("whole", 9)]


async def test_other_topics_are_not_heard() -> None:
    async with Publisher() as publisher, following(publisher.source) as listener:
        await until_subscribed(publisher, listener)
        start = len(publisher.published)
        await publisher.send(b"load", start.to_bytes(8, "big"), numbered(start))
        await publisher.publish()
        assert await listener.told(1) == [start]


async def test_messages_of_another_shape_do_not_break_the_stream() -> None:
    async with Publisher() as publisher, following(publisher.source) as listener:
        await until_subscribed(publisher, listener)
        topic, start = b"kv-events", len(publisher.published)
        for frames in ([topic], [topic, b"x"], [topic, b"x", b"y"], [topic, b"a", b"b", b"c", b"d"]):
            await publisher.send(*frames)
        await publisher.publish(10)
        assert (await listener.told(10))[-1] == start + 9
        assert [item for item in listener.unread if item != ("whole", start + 9)] == []


async def test_a_slow_reader_loses_nothing_it_cannot_ask_for_again() -> None:
    """Past the byte bound batches are dropped on arrival, seen as a gap and replayed."""
    async with Publisher() as publisher, following(publisher.source, max_bytes=3_000) as listener:
        await until_subscribed(publisher, listener)
        start = len(publisher.published)
        publisher.left_out = set()
        await publisher.publish(200)
        seen = await listener.told(2)
        await asyncio.sleep(0.3)
        await publisher.publish()
        await asyncio.sleep(0.3)
        seen += listener.unread
        arrived = [item for item in seen if isinstance(item, int)]
        lost = [range(item[1], item[2] + 1) for item in seen if isinstance(item, tuple) and item[0] == "gap"]  # type: ignore[arg-type]
        assert arrived == sorted(set(arrived))
        assert sorted([*arrived, *(seq for gap in lost for seq in gap)]) == list(range(start, start + 201))


async def test_the_loop_is_not_kept_by_a_flood() -> None:
    """Other callbacks get their turn between slices of a long replay."""
    async with Publisher() as publisher:
        await publisher.publish(5_000)
        async with following(publisher.source) as listener:
            turns = 0
            while len(listener.unread) < 5_000:
                await asyncio.sleep(0)
                turns += 1
            assert listener.unread == list(range(5_000))
            assert turns > 20


async def test_an_endpoint_that_is_none_is_our_error() -> None:
    context = new_context()
    for source in (EventSource(0, "nonsense"), EventSource(0, "tcp://no-port")):
        with pytest.raises(EngineUnreachable) as caught:
            await anext(Follower(context, source, None, clock=asyncio.get_running_loop().time).items())
        assert source.endpoint not in str(caught.value)
    context.term()


def test_the_context_has_room_for_hundreds_of_ranks() -> None:
    context = new_context()
    assert context.get(zmq.MAX_SOCKETS) >= 10_000
    context.term()


def test_short_tells_batches_and_losses_apart() -> None:
    assert short(EventBatch(3, [])) == ("whole", 3)
