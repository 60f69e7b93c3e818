"""When a request leaves the waiting room, and for which engine: the rule, without the queues.

Three mechanisms, measured on public traces: on 8 simulated H100s with an 8B model at 4 × the recorded load mean TTFT
is a tenth of what it is placed at arrival (`examples/replay/RESULTS.md`).

head start  what is soon computed goes first, but only so far: request r stands in line as if it had arrived at
            arrival + min(κ · m_r, G), m_r its own prefill on the engine that holds most of it. Nothing that arrives
            more than G later can overtake it. G is 50 s, and more only where more than 6 s of work wait for every
            engine: there all would wait that long if they were served as they come. κ is 40, and grows with G once
            prefills of 2.5 s stay behind it: else the short ones, that are most, would stand as close together as when
            little waits, and wait for each other as if in the order of arrival.
hold        a request waits for the busy engine that holds its prefix while λ · (prefill there saved) is more than what
            that engine has still to do. What its prefills will push out of the prefix by then saves nothing. λ grows
            from 4 to 10 with the work that waits: the longer the line, the more every token computed twice costs the
            others.
gap         while others wait, an engine rests shortly after a prefill, so that those who decode there move on: only
            once prefills have lately taken more of its time than their pace allows, since it costs throughput, and not
            where decoding alone is too slow for that pace: no rest would help.
"""

from __future__ import annotations

import msgspec

from router.core import Rates

GAP_STEP_S = 0.001
"""Small, since what a gap does shows only when answers end, seconds later: four times as much was measured at 6 points
less of scaled goodput where engines are saturated."""


class RoomRule(msgspec.Struct, frozen=True):
    """Times in seconds."""

    free_tokens: int = 2_048  # an engine takes more while fewer uncached tokens are under way there
    join_tokens: int = 512  # who adds no more than this to the prefill of a sibling may follow it to a busy engine
    signal_delay_s: float = 0.015  # from a first token in the engine until it is known here
    gap_s: float = 0.1  # at most, from the end of a prefill until the next may begin, the signal's delay included
    pace_s: float = 0.045  # a token, which those who decode are to keep: somewhat less than `tpot_s`
    owed_free_s: float = 1.0  # so much prefill at a time makes no answer slow, which lasts for seconds: no rest for it
    ttft_s: float = 1.0  # and twice its own prefill: a first token after that is late
    tpot_s: float = 0.05  # an answer that takes longer for a token is slow
    slow_share: float = 0.2  # so many may be more slow than late before the gap grows
    head_start: float = 40.0  # κ: seconds in line for a second of own prefill, at least
    head_start_max_s: float = 50.0  # G, while not too much waits
    head_start_backlog: float = 8.0  # times the seconds of work that wait for each engine, if that is more
    head_start_of_wait: float = 0.7  # of what a request may wait at all: never more, else it would be refused for it
    told_apart_s: float = 2.5  # prefills up to this stand apart in line, however long G is
    memory_patience_s: float = 6.0  # so long a request waits for an engine whose KV memory has room for all of it
    patient_share: float = 0.05  # of that memory; what needs less finds room as answers end, however long it has waited
    crowded_share: float = 0.125  # of engines, and one at least, may be working off answers for a prompt that waited so
    hold: bool = True
    hold_factor: float = 1.3  # what an engine has still to do takes so much longer: it decodes meanwhile
    hold_slack_s: float = 0.05  # nobody is held for less
    rest_pressure: float = 0.25  # from here on an engine rests as long as the gap says
    full_pressure_s: float = 0.5  # waiting work per engine at which the pressure is 1
    eagerness_min: float = 4.0  # λ while nobody waits: a second copy also pushes out what others would have hit
    eagerness_max: float = 10.0  # λ at full pressure

    def longest_head_start_s(self, backlog_s: float, wait_s: float) -> float:
        """G for a request that arrives while so many seconds of work wait for each engine, and may wait `wait_s`."""
        return min(self.head_start_of_wait * wait_s, max(self.head_start_max_s, self.head_start_backlog * backlog_s))

    def place_in_line(self, arrived_at: float, prefill_ms: float, longest_s: float) -> float:
        """What the line is ordered by, seconds. `longest_s`: G."""
        start = max(self.head_start, longest_s / self.told_apart_s) * prefill_ms / 1e3
        return arrived_at + (start if start < longest_s else longest_s)

    def pressure(self, waiting_ms: float, engines: int) -> float:
        """0..1, while prefills of `waiting_ms` in all wait for so many engines."""
        pressure = waiting_ms / (engines * self.full_pressure_s * 1e3) if engines else 1.0
        return pressure if pressure < 1.0 else 1.0

    def eagerness(self, pressure: float) -> float:
        """λ: what a millisecond of prefill is worth."""
        return self.eagerness_min + (self.eagerness_max - self.eagerness_min) * pressure

    def takes_tokens(self, rates: Rates, step_ms: float) -> int:
        """Uncached tokens under way below which an engine is free: it must not run dry before we hear of it.

        `step_ms`: a step of those who decode there. Where that alone is too slow for their pace, an engine takes what
        it computes in the time of one: who comes waits for the step that has begun, and the next should take them all.
        """
        if rates.c1_ms <= 0:
            return self.free_tokens
        ahead_ms = self.signal_delay_s * 1e3 + (step_ms if self.prefill_share(step_ms) <= 0 else 0.0)
        return max(self.free_tokens, int(ahead_ms / rates.c1_ms))

    def busy_ms(self, rates: Rates, prefill_ms: float, step_ms: float) -> float:
        """What a request would wait for an engine that has so much of its prefills still to do."""
        over_ms = prefill_ms - rates.c1_ms * self.takes_tokens(rates, step_ms)
        return self.hold_factor * (over_ms if over_ms > 0 else 0.0) + self.hold_slack_s * 1e3

    def prefill_share(self, step_ms: float) -> float:
        """So much of an engine's time prefills may take if those who decode there, a step for each token, are to keep
        their pace. Not above 0: they cannot, whatever it rests.
        """
        return 1.0 - step_ms / (self.pace_s * 1e3)

    def owed_s(self, owed_s: float, elapsed_s: float, prefill_s: float, share: float) -> float:
        """What those who decode are owed after a further prefill: by how much prefills have outrun their share.

        Beyond what two of the longest rests make up for it is forgotten: those who were held up have left by then.
        """
        paid_s = share * elapsed_s if share > 0 else 0.0
        return min(max(0.0, owed_s - paid_s) + prefill_s, self.owed_free_s + 2 * self.gap_s)

    def rest_s(self, owed_s: float, share: float, gap_s: float, pressure: float) -> float:
        """How long an engine rests that has just finished a prefill, from when that is known here.

        With little waiting there will be pauses enough by themselves.
        """
        if share <= 0:
            return 0.0
        longest = min(gap_s, (owed_s - self.owed_free_s) / share) - self.signal_delay_s
        return max(0.0, longest * min(1.0, pressure / self.rest_pressure))

    def next_gap_s(self, gap_s: float, *, slow: bool, late: bool) -> float:
        """The gap after an answer: longer if its tokens came too slowly, shorter if its first one came too late."""
        step = GAP_STEP_S * (slow - late) - self.slow_share * GAP_STEP_S
        return min(self.gap_s, max(0.0, gap_s + step))
