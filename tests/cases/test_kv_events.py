"""What engines tell of their caches, and what must be believed of it."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.cases.engine import Engine
from tests.cases.events import EventPort, stored
from tests.cases.stand import COMPLETIONS, Stand, case_input, client_bodies, ids_body, kv_steps

A, B, C = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]
NEXT = 99  # a prompt's last token is always computed, so that a hit needs one more than the blocks it is of


# https://github.com/llm-d/llm-d-router/issues/1737, https://github.com/ai-dynamo/dynamo/pull/7072
class TestLostBatches:
    async def _lose_two(self, stand: Stand, port: EventPort) -> int:
        """Publishes the case's batches; returns how many replays were asked for because of the gap."""
        await stand.start(Engine("A", ports=[port]))
        before = len(port.requests)
        for step in kv_steps("43"):
            await stand.publish(step)
        return len(port.requests) - before

    async def test_a_replay_makes_the_gap_good(self, stand: Stand) -> None:
        asked = await self._lose_two(stand, EventPort(ring=3))
        assert await stand.credit([*A, NEXT]) == {"A": 0}
        assert await stand.credit([*A, *B, NEXT]) == {"A": 0}
        assert await stand.credit([*C, NEXT]) == {"A": 4}
        assert asked == 1
        (row,) = await stand.fleet_rows()
        assert (row["confidence"], row["doubts"]) == (1.0, [])

    @pytest.mark.parametrize(
        ("settings", "asked"),
        [({"replay": False}, 0), ({"ring": 2}, 1)],
        ids=["no replay socket", "the ring has lost the first"],
    )
    async def test_what_cannot_be_replayed_costs_all_credit(
        self, stand: Stand, settings: dict[str, Any], asked: int
    ) -> None:
        assert await self._lose_two(stand, EventPort(**settings)) == asked
        assert await stand.credit([*A, NEXT]) == {"A": 0}
        assert await stand.credit([*C, NEXT]) == {"A": 0}
        (row,) = await stand.fleet_rows()
        assert row["confidence"] == 0.0
        assert "events lost" in row["doubts"][0]
        assert (await stand.metrics())["warmroute_kv_gaps_total"] == 1

    async def test_a_gateway_that_joins_late_believes_what_follows(self, stand: Stand) -> None:
        """What was stored and not removed since is held, whatever came before."""
        port = EventPort(ring=2)
        engine = await stand.launch(Engine("A", ports=[port]))
        await port.publish(stored("x", A, block_size=4), seq=499)
        await port.publish(stored("y", B, block_size=4, parent="x"), seq=500)
        await stand.start(engine)
        await stand.heard("A", 500)
        assert await stand.credit([*A, *B, NEXT]) == {"A": 8}
        assert port.requests == [0]


# https://github.com/llm-d/llm-d-router/pull/1887, https://github.com/sgl-project/sglang/pull/39822
class TestRestartBehindTheSameAddress:
    async def _store_500(self, stand: Stand) -> Engine:
        engine = Engine("A")
        await stand.start(engine)
        first, self.after = kv_steps("45")
        await stand.publish(first)
        assert await stand.overlap([*A, NEXT]) == {"A": 4}
        return engine

    async def test_the_sequence_begins_again(self, stand: Stand) -> None:
        """Nothing else tells: not a broken connection, not the start time."""
        engine = await self._store_500(stand)
        engine.port.begin_anew()
        await stand.publish(self.after)
        assert await stand.overlap([*A, NEXT]) == {"A": 0}
        assert await stand.overlap([50, 51, 52, 53, NEXT]) == {"A": 4}

    async def test_only_a_reconnect_tells(self, stand: Stand) -> None:
        """No event comes from the new process: its replay socket no longer knows the batch we stand at."""
        engine = await self._store_500(stand)
        await engine.port.restart()
        await stand.heard("A", None)
        assert await stand.overlap([*A, NEXT]) == {"A": 0}

    async def test_only_the_start_time_tells(self, stand: Stand) -> None:
        engine = await self._store_500(stand)
        engine.port.begin_anew()
        engine.started_at += 60
        await stand.heard("A", None)
        assert await stand.overlap([*A, NEXT]) == {"A": 0}

    async def test_a_batch_delivered_again_is_no_restart(self, stand: Stand) -> None:
        engine = await self._store_500(stand)
        await engine.port.publish(stored("y", B, block_size=4, parent="a"))
        await stand.heard("A", 501)
        await engine.port.publish_again(500)
        await engine.port.publish_again(501)
        await engine.port.publish(stored("w", C, block_size=4))
        await stand.heard("A", 502)
        assert await stand.overlap([*A, *B, NEXT]) == {"A": 8}
        assert (await stand.metrics())["warmroute_kv_restarts_total"] == 0


# https://github.com/vllm-project/aibrix/issues/2287, https://github.com/vllm-project/production-stack/issues/391
class TestACacheThatIsGone:
    async def _hold(self, stand: Stand) -> tuple[Engine, Engine]:
        """A holds the prefix, B nothing."""
        engines = Engine("A"), Engine("B")
        await stand.start(*engines)
        await stand.publish(next(kv_steps("46")))
        assert await stand.overlap([*A, NEXT]) == {"A": 4, "B": 0}
        return engines

    async def _until_health(self, stand: Stand, health: str) -> None:
        async def seen() -> bool:
            return bool((await stand.fleet())[0]["health"] == health)

        await stand.until(seen, what=health)

    async def test_an_engine_asleep_gets_nothing_and_wakes_up_empty(self, stand: Stand) -> None:
        sleeper, other = await self._hold(stand)
        (body,) = client_bodies("46")
        sleeper.asleep = True  # its /health says 200 all the same, and no event comes
        await self._until_health(stand, "sleeping")
        for _ in range(5):
            assert (await stand.ask(body, path=COMPLETIONS)).status_code == 200
        assert (len(sleeper.seen), len(other.seen)) == (0, 5)
        assert "sleeping" in (await stand.explain(body, path=COMPLETIONS))["filtered"]["A/0"]
        sleeper.asleep = False
        await self._until_health(stand, "ready")
        assert (await stand.overlap([*A, NEXT]))["A"] == 0

    async def test_a_clear_takes_everything_at_once(self, stand: Stand) -> None:
        sleeper, _ = await self._hold(stand)
        await sleeper.port.publish({"type": "AllBlocksCleared"})
        await stand.heard("A", 1)
        assert await stand.overlap([*A, NEXT]) == {"A": 0, "B": 0}
        assert (await stand.fleet_rows())[0]["index_blocks"] == 0


# https://github.com/sgl-project/sglang/pull/29211, https://github.com/llm-d/llm-d-kv-cache/issues/357
class TestDataParallelRanks:
    async def _four(self, stand: Stand) -> Engine:
        engine = Engine("A", ports=[EventPort(rank) for rank in range(4)])
        await stand.start(engine)
        of_rank_2, _ = kv_steps("47")
        await engine.ports[2].publish(*of_rank_2["events"], rank=2)
        await stand.heard("A", 0, rank=2)
        return engine

    async def test_a_request_is_steered_to_the_rank_that_holds_its_prefix(self, stand: Stand) -> None:
        engine = await self._four(stand)
        (body,) = client_bodies("47")
        await stand.ask(body, path=COMPLETIONS, headers={"x-data-parallel-rank": "3"})
        assert engine.seen[0].headers["x-data-parallel-rank"] == "2"
        assert len(engine.seen) == 1

    async def test_a_port_of_its_own_tells_the_rank_of_a_batch_that_does_not(self, stand: Stand) -> None:
        engine = await self._four(stand)
        _, without = kv_steps("47")
        await engine.ports[1].publish(*without["events"])
        await stand.heard("A", 0, rank=1)
        assert {c["rank"]: c["held_tokens"] for c in await self._candidates(stand)} == {
            **{rank: {} for rank in (0, 3)},
            **{rank: {"gpu": 4} for rank in (1, 2)},
        }

    async def test_on_a_shared_port_a_batch_without_a_rank_is_nobodys(self, stand: Stand) -> None:
        engine = Engine("A", ports=[EventPort()], ranks=4)
        await stand.start(engine)
        of_rank_2, without = kv_steps("47")
        await engine.port.publish(*without["events"])
        await engine.port.publish(*of_rank_2["events"], rank=2)
        await stand.heard("A", 1, rank=2)
        assert [c["rank"] for c in await self._candidates(stand) if c["held_tokens"]] == [2]
        assert (await stand.metrics())["warmroute_kv_batches_unranked_total"] == 1

    async def test_a_dead_socket_casts_doubt_on_its_rank_only(self, stand: Stand) -> None:
        engine = await self._four(stand)
        port = engine.ports.pop(3)
        await port.stop()

        async def doubted() -> bool:
            return any(row["doubts"] for row in await stand.fleet())

        await stand.until(doubted, what="a doubt")
        rows = await stand.fleet_rows()
        assert [row["rank"] for row in rows if row["doubts"]] == [3]
        assert [row["health"] for row in rows] == ["ready"] * 4
        assert [c["hit_tokens"] for c in await self._candidates(stand) if c["rank"] == 2] == [4]

    async def _candidates(self, stand: Stand) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await stand.explain(ids_body([*A, NEXT]), path=COMPLETIONS))["candidates"]
        return found


# https://github.com/ai-dynamo/dynamo/pull/14314, https://github.com/llm-d/llm-d-kv-cache/pull/691
async def test_a_block_whose_parent_is_unknown_waits_for_it_and_is_no_root(stand: Stand) -> None:
    await stand.start(Engine("A"))
    whole, middle = (body["prompt"] for body in client_bodies("49"))
    orphans, root, late = kv_steps("49")
    await stand.publish(orphans)
    assert (await stand.overlap(whole), await stand.overlap(middle)) == ({"A": 0}, {"A": 0})
    await stand.publish(root)
    assert (await stand.overlap(whole), await stand.overlap(middle)) == ({"A": 4}, {"A": 0})
    await stand.publish(late)
    assert (await stand.overlap(whole), await stand.overlap(middle)) == ({"A": 16}, {"A": 0})


# https://github.com/ai-dynamo/dynamo/pull/14314
async def test_blocks_that_wait_in_vain_are_bounded_and_counted_one_by_one(stand: Stand) -> None:
    await stand.start(Engine("A"))
    batches, blocks = 300, 256  # some 20 MB, of which 16 MiB may wait
    for number in range(batches):
        orphans = stored("", [number] * 4 * blocks, block_size=4, parent=f"never {number}")
        names = [1 + number * blocks + offset for offset in range(blocks)]
        await stand.engines["A"].port.publish(orphans | {"block_hashes": names})
    await stand.heard("A", batches - 1)
    dropped = (await stand.metrics())["warmroute_kv_orphan_blocks_dropped_total"]
    assert 0 < dropped < batches * blocks / 2
    assert dropped % blocks == 0
    assert (await stand.fleet_rows())[0]["index_blocks"] == 0


# https://github.com/ai-dynamo/dynamo/pull/14652, https://github.com/ai-dynamo/dynamo/pull/4533
async def test_each_hash_each_copy_and_each_tier_is_removed_by_itself(stand: Stand) -> None:
    """The third batch stores a block anew and removes it once: another copy is left, and a real engine still hits.

    vLLM 0.32 announces every physical copy and removes every one, so that the block is gone with the second removal.
    """
    await stand.start(Engine("A"))
    (prompt,) = (body["prompt"] for body in client_bodies("50"))
    overlaps = []
    for step in kv_steps("50"):
        await stand.publish(step)
        overlaps.append((await stand.overlap(prompt))["A"])
    assert overlaps == [8, 4, 4, 0]
    (row,) = await stand.fleet_rows()
    assert (row["index_blocks"], row["doubts"]) == (0, [])


# https://github.com/ai-dynamo/dynamo/issues/10774, https://github.com/vllm-project/production-stack/issues/687
class TestMemory:
    """The case's churn, scaled down to what takes a second or two."""

    CYCLES_A_BATCH = 20

    async def _churn(self, stand: Stand, cycles: int, *, remove: bool) -> None:
        port, shape = stand.engines["A"].port, case_input("51")["upstream"][0]["kv_churn"]
        count, seq = shape["unique_suffix_blocks"], 0
        for first in range(self.cycles, self.cycles + cycles, self.CYCLES_A_BATCH):
            events: list[dict[str, Any]] = []
            for cycle in range(first, first + self.CYCLES_A_BATCH):
                base = 1_000 + cycle * count
                names = list(range(base, base + count))
                tokens = [base + number // 4 for number in range(4 * count)]
                events.append(stored("", tokens, block_size=4, parent="root.63") | {"block_hashes": names})
                if remove:
                    events.append({"type": "BlockRemoved", "block_hashes": names, "medium": "GPU"})
            seq = await port.publish(*events)
        self.cycles += cycles
        await stand.heard("A", seq)

    async def _start(self, stand: Stand, *, capacity_tokens: int = 1 << 26, **sections: Any) -> None:
        self.cycles = 0
        await stand.start(Engine("A", ports=[EventPort(ring=10)], capacity_tokens=capacity_tokens), **sections)
        shared = case_input("51")["upstream"][0]["kv_churn"]["shared_prefix_blocks"]
        await stand.engines["A"].port.publish(stored("root", list(range(4 * shared)), block_size=4))
        await stand.heard("A", 0)

    async def test_what_was_removed_takes_no_memory(self, stand: Stand) -> None:
        await self._start(stand)
        await self._churn(stand, 1_000, remove=True)
        before = _resident_bytes()
        await self._churn(stand, 10_000, remove=True)
        assert _resident_bytes() < before * 1.1
        assert (await stand.metrics())["warmroute_kv_blocks_stored_total"] == 64 + 11_000 * 32
        assert (await stand.fleet_rows())[0]["index_blocks"] == 64

    async def test_lost_removals_stop_at_the_cap(self, stand: Stand) -> None:
        await self._start(stand, index={"max_bytes": "4MiB"})
        await self._churn(stand, 2_000, remove=False)  # 64,000 blocks, of which 4 MiB hold about a third
        (row,) = await stand.fleet_rows()
        assert 10_000 < row["index_blocks"] < 4 * 2**20 / 150
        assert (await stand.metrics())["warmroute_kv_index_evictions_total"] > 0

    async def test_lost_removals_stop_at_what_the_engine_can_hold(self, stand: Stand) -> None:
        await self._start(stand, capacity_tokens=40_000)
        await self._churn(stand, 1_000, remove=False)  # 32,000 blocks, where 10,000 fit
        (row,) = await stand.fleet_rows()
        assert 9_000 < row["index_blocks"] <= 12_500
        assert (await stand.metrics())["warmroute_kv_index_evictions_total"] > 0


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
