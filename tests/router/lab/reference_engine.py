"""The engine again, as slow and plain as can be: one loop over every sequence and token, linear searches, no calendar.

Written from the rules, not from `router.lab.engine`, to have something to compare it with.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from router.core import Rates


@dataclass(eq=False)
class Block:
    name: int | None = None
    owners: int = 0


@dataclass(eq=False)
class Sequence:
    id: str
    prompt: int
    output: int
    hashes: list[int]
    computed: int = 0
    produced: int = 0
    blocks: list[Block] = field(default_factory=list)
    cached: int | None = None
    prefilling: bool = True


@dataclass
class Step:
    ms: float
    produced: list[str]
    finished: set[str]
    preempted: list[str]
    log: list[tuple[str, int]]


class ReferenceEngine:
    def __init__(self, rates: Rates, block_size: int, blocks: int, seats: int, budget: int, whole: bool) -> None:
        self.rates, self.size, self.seats, self.budget = rates, block_size, seats, budget
        self.whole = whole
        self.free = [Block() for _ in range(blocks)]
        self.registered: list[Block] = []  # in the order of registration
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.log: list[tuple[str, int]] = []

    def step(self) -> Step | None:
        if not self.running and not self.waiting:
            return None
        left, plan, preempted = self.budget, [], []
        for seq in list(self.running):
            if seq not in self.running or left == 0:
                continue
            new = min(seq.prompt + seq.produced - seq.computed, left)
            while not self.allocate(seq, [], new):
                victim = self.running.pop()
                self.give_up(victim)
                victim.computed, victim.prefilling = 0, True
                self.waiting.insert(0, victim)
                preempted.append(victim.id)
                if victim is seq:
                    break
            else:
                plan.append((seq, new))
                left -= new
        while not preempted and self.waiting and left and len(self.running) < self.seats:
            seq = self.waiting[0]
            known = seq.prompt + seq.produced
            hits = self.hits(seq, known)
            new = min(known - len(hits) * self.size, left)
            seq.computed = len(hits) * self.size
            if (self.whole and not self.fits(seq, hits, known)) or not self.allocate(seq, hits, new):
                seq.computed = 0
                break
            if seq.cached is None:
                seq.cached = seq.computed
            self.waiting.pop(0)
            self.running.append(seq)
            plan.append((seq, new))
            left -= new
        return self.execute(plan, preempted)

    def execute(self, plan: list[tuple[Sequence, int]], preempted: list[str]) -> Step:
        decodes = [seq for seq, _ in plan if not seq.prefilling]
        chunks = [(new, seq.computed) for seq, new in plan if seq.prefilling]
        r = self.rates
        total = sum(new for new, _ in chunks) + len(decodes)
        ms = (
            r.c0_ms
            + r.c1_ms * max(0, total - r.n0_tokens)
            + r.c2_ms * sum(n * (p + n / 2) for n, p in chunks)
            + r.c3_ms * sum(s.computed for s in decodes)
            + r.c4_ms * len(decodes)
        )
        produced, finished = [], set()
        for seq, new in plan:
            seq.computed += new
            if seq.computed < seq.prompt + seq.produced:
                continue
            seq.prefilling = False
            seq.produced += 1
            produced.append(seq.id)
        for seq in [s for s in self.running if s.produced == s.output]:
            self.running.remove(seq)
            self.give_up(seq)
            finished.add(seq.id)
        log, self.log = self.log, []
        return Step(ms, produced, finished, preempted, log)

    def hits(self, seq: Sequence, known: int) -> list[Block]:
        found = []
        for index in range((known - 1) // self.size):
            if index >= len(seq.hashes):
                break
            same = [b for b in self.registered if b.name == seq.hashes[index]]
            if not same:
                break
            found.append(same[0])
        return found

    def fits(self, seq: Sequence, hits: list[Block], tokens: int) -> bool:
        need = -(-tokens // self.size) - len(seq.blocks) - len(hits)
        return need + sum(b.owners == 0 for b in hits) <= len(self.free)

    def allocate(self, seq: Sequence, hits: list[Block], new: int) -> bool:
        if not self.fits(seq, hits, seq.computed + new):
            return False
        need = -(-(seq.computed + new) // self.size) - len(seq.blocks) - len(hits)
        for block in hits:
            if block.owners == 0:
                self.free.remove(block)
            block.owners += 1
            seq.blocks.append(block)
        for _ in range(need):
            block = self.free.pop(0)
            if block.name is not None:
                self.log.append(("removed", block.name))
                self.registered.remove(block)
                block.name = None
            block.owners = 1
            seq.blocks.append(block)
        for index in range(seq.computed // self.size, (seq.computed + new) // self.size):
            if index < len(seq.hashes):
                seq.blocks[index].name = seq.hashes[index]
                self.registered.append(seq.blocks[index])
                self.log.append(("stored", seq.hashes[index]))
        return True

    def give_up(self, seq: Sequence) -> None:
        for block in reversed(seq.blocks):
            block.owners -= 1
            if block.owners == 0:
                if block.name is None:
                    self.free.insert(0, block)
                else:
                    self.free.append(block)
        seq.blocks = []

    def abort(self, id: str) -> None:
        for queue in (self.waiting, self.running):
            for seq in [s for s in queue if s.id == id]:
                queue.remove(seq)
                self.give_up(seq)
