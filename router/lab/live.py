"""The engine model in real time: a step takes as long as it says; then its tokens go out, and its events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from functools import partial

from router.lab.engine import EngineModel, EngineRequest, StepResult
from router.lab.events import EventPublisher
from router.lab.exposition import SLEEP_STATES, EngineMetrics
from router.lab.sessions import Choice, Session

_TIMER_S = 0.002  # shorter pauses are added up: uvloop's timers tick in whole milliseconds
_BEHIND_S = 0.1  # who lags more gives up catching up


class LiveEngine:
    """Owns the sessions in flight. `run` is its one task."""

    def __init__(
        self, model: EngineModel, metrics: EngineMetrics, *, publisher: EventPublisher | None, speed: float
    ) -> None:
        self.model = model
        self.crashed = False
        self.awake = True
        self._metrics = metrics
        self._publisher = publisher
        self._speed = speed
        self._choices: dict[EngineRequest, Choice] = {}
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        """Answers in flight."""
        return len(self._choices)

    def admit(self, session: Session) -> None:
        session.responder.on_gone = partial(self._abort, session.choices, "abort")
        for choice in session.choices:
            self._choices[choice.request] = choice
            self.model.submit(choice.request)
        self._wake.set()

    def fail_all(self) -> None:
        """Every answer in flight ends with the error of a dead engine core."""
        choices = list(self._choices.values())
        self._abort(choices, "error")
        for session in dict.fromkeys(choice.session for choice in choices):
            session.responder.on_gone = None
            session.fail()

    def crash(self) -> None:
        self.crashed = True
        self.fail_all()

    def sleep(self, level: int) -> None:
        """Drops requests and cache, and takes no step until `wake`. Level 1 keeps the weights, 2 does not."""
        self.fail_all()
        self.model.reset_cache()
        self.awake = False
        self._metrics.sleep_state = SLEEP_STATES[min(max(level, 1), 2)]

    def wake(self) -> None:
        self.awake = True
        self._metrics.sleep_state = SLEEP_STATES[0]
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            result = self.model.step(due) if self.awake else None
            if result is None:
                self._wake.clear()
                await self._wake.wait()
                due = clock()
                continue
            due = max(due, clock() - _BEHIND_S) + result.duration_ms / 1000 / self._speed
            pause = due - clock()
            await asyncio.sleep(pause if pause > _TIMER_S else 0)
            self._finish_step(result, clock())

    def _finish_step(self, result: StepResult, now: float) -> None:
        """Tokens first, then events: vLLM publishes from a thread of its own, at the end of a step."""
        touched: dict[Session, None] = {}
        for request in (*result.decoded, *result.first):
            choice = self._choices.get(request)
            if choice is None:
                continue  # aborted while the step ran
            choice.deliver(1)
            self._observe(choice, now)
            if choice.session.streams or choice.finish is not None:
                touched[choice.session] = None
        for session in touched:
            session.flush()
        self._metrics.generation_tokens += len(result.decoded) + len(result.first)
        self._metrics.step_tokens.observe(result.prefill_tokens + len(result.decoded))
        if result.events and self._publisher is not None:
            self._publisher.publish(result.events, time.time())

    def _observe(self, choice: Choice, now: float) -> None:
        metrics = self._metrics
        if choice.delivered == 1:
            metrics.ttft_s.observe(now - choice.session.began)
            metrics.prompt_tokens += choice.request.prompt_tokens
        else:
            metrics.inter_token_s.observe(now - choice.last_at)
        choice.last_at = now
        if choice.finish is not None:
            metrics.latency_s.observe(now - choice.session.began)
            metrics.finished["length" if choice.finish == "length" else "stop"] += 1
            del self._choices[choice.request]

    def _abort(self, choices: Iterable[Choice], reason: str) -> None:
        for choice in choices:
            if self._choices.pop(choice.request, None) is not None:
                self.model.abort(choice.request)
                self._metrics.finished[reason] += 1
