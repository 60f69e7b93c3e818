"""Which engines keep caches apart: looked for when an engine joins, and again whenever its process is a new one.

facts of an engine ──its boot is known──> the stored proof ──else──> three probes (`routing/proof.py`)
    ──> the fleet, which places isolated callers by it, and the relay, which writes salts where they are taken
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from router.core import Adapter, Instance
from router.errors import EngineError, StoreUnavailable
from router.routing.blocks import chain, root_key
from router.routing.fleet import Fleet, Health, Rank
from router.routing.index import BlockIndex
from router.routing.proof import Proof, prove
from router.serving.apis import APIS
from router.serving.engines import Engines
from router.serving.isolation.catalogue import unreviewed
from router.serving.isolation.salts import kept_apart_on, salted_paths
from router.store.isolation import ProofRow, ProofStore

log = logging.getLogger("warmroute")

LOOK_S = 0.25
AT_ONCE = 4
RETRY_S, RETRY_AT_MOST_S = 5.0, 3_600.0
"""An engine that was not seen to honour salts is asked again: it may have been too busy to tell."""
_OPEN = "it answers without a key, so that tenants could go past the gateway: start it with --api-key and set api_key"
_FIELDS_SHOWN = 12


class _Known:
    __slots__ = ("again_at", "boot", "row", "tries", "unreviewed")

    def __init__(self, boot: str) -> None:
        self.boot = boot
        self.row: ProofRow | None = None  # None: on its way
        self.tries = 0
        self.again_at = 0.0
        self.unreviewed: tuple[str, ...] = ()


class Prover:
    """`start` and `stop` on the running loop. wanted: whether there is anybody to be kept apart; else nothing is asked.

    open_engines: whether an engine that answers without a key may be used by those who must be kept apart.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        index: BlockIndex,
        engines: Engines,
        adapters: Mapping[str, Any],
        secret: bytes,
        wanted: Callable[[], bool],
        store: ProofStore | None = None,
        open_engines: bool = True,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._engines = engines
        self._adapters = adapters
        self._secret = secret
        self._wanted = wanted
        self._store = store
        self._open_engines = open_engines
        self._clock = clock
        self._wall_clock = wall_clock
        self._known: dict[str, _Known] = {}  # by instance
        self._stored: dict[tuple[str, str], ProofRow] | None = None
        self._gate = asyncio.Semaphore(AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._spawn(self._look())

    async def stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def rows(self) -> list[dict[str, Any]]:
        """One row an engine."""
        return [self._row(instance) for instance in self._fleet.instances()]

    def _row(self, instance: Instance) -> dict[str, Any]:
        rank, known = self._fleet.rank(instance.id, 0), self._known.get(instance.id)
        row = known.row if known is not None else None
        assert rank is not None, "an instance has a first rank"
        notes = [_OPEN] if rank.facts.open_without_key else []
        if known is not None and known.unreviewed:
            notes.append(f"describes fields that were not reviewed: {', '.join(known.unreviewed)}")
        return {
            "instance": instance.id,
            "model": instance.model,
            "engine": instance.engine,
            "version": rank.facts.version,
            "verified": bool(rank.kept_apart_on) or not rank.caches,
            "method": "none" if not rank.caches else row.method if row is not None else None,  # None: not asked yet
            "detail": rank.isolation if rank.caches else "keeps no prefixes",
            "verified_at": row.at if row is not None and row.verified else None,
            "kept_apart_on": sorted(rank.kept_apart_on),
            "labels": dict(instance.labels),
            "notes": notes,
        }

    # -- looking

    async def _look(self) -> None:
        while True:
            if self._wanted():
                if self._stored is None:
                    self._stored = await self._read_stored()
                instances = self._fleet.instances()
                for gone in self._known.keys() - {instance.id for instance in instances}:
                    del self._known[gone]
                for instance in instances:
                    self._look_at(instance, self._stored)
            await asyncio.sleep(LOOK_S)

    async def _read_stored(self) -> dict[tuple[str, str], ProofRow]:
        """Nothing, where the database is away: then engines are asked."""
        if self._store is None:
            return {}
        try:
            return {(row.instance, row.model): row for row in await self._store.read()}
        except StoreUnavailable:
            return {}

    def _look_at(self, instance: Instance, stored: Mapping[tuple[str, str], ProofRow]) -> None:
        rank = self._fleet.rank(instance.id, 0)
        if rank is None or rank.health is not Health.READY or not rank.facts.served or not rank.caches:
            return
        boot = rank.facts.boot_id or f"since {rank.since}"  # else it may be another one each time it comes back
        known = self._known.get(instance.id)
        if known is not None and known.boot == boot:
            if known.row is None or known.row.verified or self._clock() < known.again_at:
                return
        else:
            known = self._known[instance.id] = _Known(boot)
        row = stored.get((instance.id, instance.model))
        known_before = row if row is not None and row.boot == boot and row.verified and not known.tries else None
        known.row = None
        self._spawn(self._find_out(rank, known, known_before))

    async def _find_out(self, rank: Rank, known: _Known, stored: ProofRow | None) -> None:
        instance, facts = rank.instance, rank.facts
        adapter: Adapter = self._adapters[instance.engine]
        async with self._gate:
            describe = getattr(adapter, "request_fields", None)
            try:
                described = {} if describe is None else await describe(instance)
                proof = Proof(True, stored.method, stored.detail) if stored is not None else None  # type: ignore[arg-type]
                if not self._open_engines and facts.open_without_key:
                    proof = Proof(False, "none", _OPEN)
                if proof is None:
                    proof = await prove(instance, adapter, facts, partial(self._saw_salt, rank))
            except EngineError as error:
                described, proof = {}, Proof(False, "none", f"it could not be asked: {error.message}")
        at = self._wall_clock() if stored is None else stored.at
        known.row = row = ProofRow(instance.id, instance.model, known.boot, *_columns(proof), at)
        if self._known.get(instance.id) is not known or self._fleet.rank(instance.id, 0) is not rank:
            return  # it has gone, or come back as another
        self._take(rank, known, proof, described)
        if not proof.verified:
            known.again_at = self._clock() + min(RETRY_AT_MOST_S, RETRY_S * 2**known.tries)
            known.tries += 1
        if self._store is not None and stored is None and facts.boot_id is not None:
            try:
                await self._store.write(row)
            except StoreUnavailable:
                log.warning("%s: what was seen of its isolation could not be stored", instance.id)

    def _take(self, rank: Rank, known: _Known, proof: Proof, described: Mapping[str, Sequence[frozenset[str]]]) -> None:
        instance = rank.instance
        salted = salted_paths(instance.engine, described, verified=proof.verified) & APIS.keys()
        apart = kept_apart_on(salted) if proof.verified else frozenset[str]()
        seen = f"seen by {proof.method}: {proof.detail}" if proof.verified else proof.detail
        self._fleet.keep_apart(instance.id, apart, seen)
        engine = self._engines.find(instance.id)
        if engine is not None:
            engine.salt(salted)
        if not proof.verified and not known.tries:
            log.warning("%s: isolated tenants are not placed there: %s", instance.id, proof.detail)
        fields = tuple(sorted({field for _, field in unreviewed(described)}))
        if fields and fields != known.unreviewed:
            shown = ", ".join(fields[:_FIELDS_SHOWN])
            log.warning("%s describes fields that were not reviewed; isolated keys may not set %s", instance.id, shown)
        known.unreviewed = fields

    async def _saw_salt(self, rank: Rank, tokens: list[int], salt: str, wait_s: float) -> bool:
        """By our own index: blocks that events have told of lie under the salt they told."""
        if rank.slot is None or rank.slot_is_assumed:
            return False
        model, size, until = rank.slot.model, rank.block_size, self._clock() + wait_s
        salted = chain(root_key(self._secret, model, None, salt), tokens, size)
        plain = chain(root_key(self._secret, model, None, None), tokens, size)
        while self._clock() < until:
            if any(slot is rank.slot for slot, _ in self._index.match(plain, size)):
                return False
            if any(slot is rank.slot for slot, _ in self._index.match(salted, size)):
                return True
            await asyncio.sleep(0.02)
        return False

    # -- tasks

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("looking for isolation ended: %s", type(error).__name__, exc_info=error)


def _columns(proof: Proof) -> tuple[bool, str, str]:
    return proof.verified, proof.method, proof.detail
