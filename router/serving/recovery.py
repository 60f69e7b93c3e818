"""What failed before the first byte of its answer is tried once more: elsewhere, later, or by another model. A stream
that broke off after it is gone on with, where that is asked for and sound.

`failover.py` and `resume.py` have the rules. They are followed here, beside the life of a request that needs none of
them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from router.core import Caller, Prompt
from router.errors import ClientError, NoEngine, Quarantined, RoomFull, ShuttingDown, WaitedTooLong, WarmrouteError
from router.serving.attempt import Answer, Attempt
from router.serving.call import Call
from router.serving.failover import Fault, RetryBudget, Tries, fault_amid, fault_of
from router.serving.models import Models, Named, permits
from router.serving.openai_errors import CONTEXT_LENGTH_EXCEEDED
from router.serving.proxy import Proxy
from router.serving.quarantine import Quarantine
from router.serving.reply import Reply

if TYPE_CHECKING:
    from router.serving.gateway import Passage

_NOWHERE = (NoEngine, RoomFull, WaitedTooLong)


class Attempts(Protocol):
    """What the gateway does for every attempt."""

    async def attempt(
        self, passage: Passage, call: Call, prompt: Prompt, reply: Reply, tries: Tries | None = None
    ) -> Answer: ...

    def read_prompt(self, call: Call) -> Awaitable[Prompt]: ...

    def may_bill(self, caller: Caller, model: str) -> bool:
        """Whether somebody may be served by a model, as far as its price goes."""
        ...

    def give_back(self, passage: Passage, reply: Reply, error: WarmrouteError) -> None:
        """The place of an attempt that failed."""
        ...


class Recovery:
    def __init__(
        self,
        attempts: Attempts,
        models: Models,
        proxy: Proxy,
        quarantine: Quarantine,
        budget: RetryBudget,
        *,
        on_fault: Callable[[str, str], None],
        dice: random.Random,
    ) -> None:
        self._attempts = attempts
        self._models = models
        self._proxy = proxy
        self._quarantine = quarantine
        self._budget = budget
        self._on_fault = on_fault
        self._dice = dice

    async def recover(
        self, passage: Passage, call: Call, prompt: Prompt, reply: Reply, error: WarmrouteError
    ) -> Answer:
        """As far as that can do no harm. Raises the error that is to be told."""
        if not reply.started:
            try:
                return await self._begin_again(passage, call, prompt, reply, error)
            except WarmrouteError as final:
                error = final
        if not reply.started or passage.call is None or passage.call.transcript is None:
            raise error
        return await self._resume(passage, passage.call, reply, error)

    # -- before the first byte

    async def _begin_again(
        self, passage: Passage, call: Call, prompt: Prompt, reply: Reply, error: WarmrouteError
    ) -> Answer:
        """By another engine of the model, or by another model."""
        asked_models = {call.named.model.name}
        while True:
            try:
                return await self._try_again(passage, call, prompt, reply, error)
            except WarmrouteError as final:
                error = final
            named = None if reply.started else self._other_model(call, error, asked_models)
            if named is None:
                raise error
            asked_models.add(named.model.name)
            self._attempts.give_back(passage, reply, error)
            call = passage.call = call.asked_of(named)
            prompt = passage.prompt = await self._attempts.read_prompt(call)
            try:
                return await self._attempts.attempt(passage, call, prompt, reply)
            except WarmrouteError as failed:
                error = failed

    async def _try_again(
        self, passage: Passage, call: Call, prompt: Prompt, reply: Reply, error: WarmrouteError
    ) -> Answer:
        """By the same model. Raises the error of the last attempt."""
        tries = Tries(call.named.model.failover, self._budget, dice=self._dice)
        while True:
            booking = passage.booking
            fault = await self._fault(call, booking.instance, error) if booking and not reply.started else None
            if fault is None or booking is None:
                raise error
            if fault is Fault.DIED and self._quarantine.note(call.body, booking.instance, call.caller.domain):
                raise deadly()
            if not tries.again(fault, booking.instance, age_s=passage.age_s):
                raise error
            self._attempts.give_back(passage, reply, error)
            try:
                return await self._elsewhere_or_later(passage, call, prompt, reply, tries, fault, error)
            except WarmrouteError as failed:
                error = failed

    async def _elsewhere_or_later(
        self,
        passage: Passage,
        call: Call,
        prompt: Prompt,
        reply: Reply,
        tries: Tries,
        fault: Fault,
        error: WarmrouteError,
    ) -> Answer:
        pause_s: float | None = tries.pause_s(fault)
        while pause_s is not None:
            if pause_s:
                await asyncio.ensure_future(asyncio.sleep(pause_s))
            try:
                return await self._attempts.attempt(passage, call, prompt, reply, tries)
            except _NOWHERE:
                pause_s = tries.wait_s(fault, error.retry_after_s, age_s=passage.age_s) if tries.failed else None
                tries.failed = ()  # whoever failed may be asked again, once
        raise error

    async def _fault(self, call: Call, instance: str, error: WarmrouteError) -> Fault | None:
        fault = fault_of(error)
        if fault is Fault.RESET and not await asyncio.ensure_future(self._proxy.is_there(instance)):
            fault = Fault.DIED
        if fault is not None:
            self._on_fault(call.named.model.name, fault)
        return fault

    def _other_model(self, call: Call, error: WarmrouteError, asked: set[str]) -> Named | None:
        """Which one is configured for such a case, and is there."""
        model = call.named.model
        names: Sequence[str] = ()
        if error.code == CONTEXT_LENGTH_EXCEEDED:
            names = model.larger
        elif not isinstance(error, (ClientError, ShuttingDown)):
            names = model.fallbacks
        for name in names:
            named = self._models.find(name)
            if named is None or named.model.name in asked or not permits(call.caller.models, name, named):
                continue
            if self._attempts.may_bill(call.caller, named.model.name):
                return named
        return None

    # -- after it

    async def _resume(self, passage: Passage, call: Call, reply: Reply, error: WarmrouteError) -> Answer:
        """Another engine goes on where one broke off. Where none can, the error is that of the one that broke off."""
        broken, booking = passage.attempt, passage.booking
        assert broken is not None, "an answer that has begun is an attempt's"
        tries = Tries(call.named.model.failover, self._budget, dice=self._dice)
        first_token_at, broke_at, latest = broken.first_token_at, passage.age_s, error
        try:
            while passage.booking is not None and not broken.inside:
                instance = passage.booking.instance
                fault = await self._fault_amid(passage, call, instance, latest)
                going_on = await self._going_on(passage, call, broken) if fault is not None else None
                if fault is None or going_on is None:
                    break
                if not tries.again(fault, instance, age_s=passage.age_s - broke_at):
                    break
                tries.failed += self._proxy.unable_to(going_on[0])
                self._attempts.give_back(passage, reply, latest)
                try:
                    return await self._attempts.attempt(passage, *going_on, reply, tries)
                except WarmrouteError as failed:
                    latest = failed
                if passage.attempt is not None and passage.attempt.in_events:
                    error, broken, booking, broke_at = latest, passage.attempt, passage.booking, passage.age_s
            if latest is not error:
                self._attempts.give_back(passage, reply, latest)
            raise error
        finally:  # however it ends, what the client has it has
            passage.answered = booking
            if passage.attempt is None or not passage.attempt.in_events:
                passage.attempt = broken
            passage.attempt.first_token_at = first_token_at

    async def _fault_amid(self, passage: Passage, call: Call, instance: str, error: WarmrouteError) -> Fault | None:
        """None: it is not to be gone on with."""
        if passage.attempt is not None and passage.attempt.in_events:
            fault = fault_amid(error)
            died = fault is not None and not await asyncio.ensure_future(self._proxy.is_there(instance))
        else:  # who was to go on did not begin to
            fault = await self._fault(call, instance, error)
            died = fault is Fault.DIED
        return None if died and self._quarantine.note(call.body, instance, call.caller.domain) else fault

    async def _going_on(self, passage: Passage, call: Call, broken: Attempt) -> tuple[Call, Prompt] | None:
        """What the next engine is asked, and a prompt to place that by: what others may hold of it is the old one."""
        prompt, transcript = passage.prompt, call.transcript
        if prompt is None or transcript is None:
            return None
        if broken.usage is not None:
            transcript.prompt_tokens = broken.usage.input_tokens
        elif prompt.exact:
            transcript.prompt_tokens = prompt.tokens
        continued = await asyncio.ensure_future(asyncio.to_thread(call.continued))
        if continued is None:
            return None
        return continued, msgspec.structs.replace(prompt, tokens=prompt.tokens + transcript.tokens)


def deadly() -> Quarantined:
    return Quarantined("Engines that took this request died. It is not given to another.")
