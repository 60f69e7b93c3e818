"""From an HTTP body to token ids in and token ids out: everything that is decided before a step is run."""

from __future__ import annotations

import asyncio
import secrets
from array import array
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from router.lab.answers import ChatShape, CompletionShape, Shape
from router.lab.calls import Call, Conversation, Tokenize, read_call, refused, unknown_model, unrenderable, wanted_tool
from router.lab.chat import ChatModel, Reply, Unrenderable
from router.lab.engine import EngineRequest
from router.lab.options import SimEngineOptions

_COMPLETION_TOKENS = 16  # of a text completion that sets no limit
_INLINE_BYTES = 1_024  # bodies up to here, with answers up to there, take about 1 ms to read
_INLINE_TOKENS = 256


class Prepared:
    """A call that can start: token ids in, token ids out."""

    def __init__(self, call: Call, *, lora: str | None, block_size: int) -> None:
        self.call = call
        self.lora = lora
        self.block_size = block_size
        self.prompts: list[list[int]] = []
        self.texts: list[str] = []  # to be echoed, one for each choice
        self.replies: list[Reply] = []
        self.requests: list[EngineRequest] = []

    def add(self, prompt: list[int], reply: Reply) -> None:
        salt = self.call.cache_salt
        self.replies.append(reply)
        self.requests.append(
            EngineRequest.from_tokens(
                secrets.token_hex(8), prompt, reply.ids, block_size=self.block_size, lora=self.lora, salt=salt
            )
        )

    def shape(self, *, chat: bool, id: str, created: int, model: str) -> Shape:
        call = self.call
        made = ChatShape if chat else CompletionShape
        prompts = [prompt for prompt in self.prompts for _ in range(call.choices)] if call.return_token_ids else None
        return made(id, created=created, model=call.model or model, top=call.top, prompt_ids=prompts, echoed=self.texts)


class Reception:
    """Reads bodies and decides what will be said. Long prompts are read in a thread, off the event loop."""

    def __init__(self, options: SimEngineOptions, chat: ChatModel, *, max_model_tokens: int) -> None:
        self._options = options
        self._chat = chat
        self.max_model_tokens = max_model_tokens
        self.served = [options.model, *options.loras]

    def lora_of(self, model: str | None) -> str | None:
        """The adapter's name if one is asked for. Raises Rejected."""
        if model is None or model == self._options.model:
            return None
        if model not in self._options.loras:
            raise unknown_model(model, self.served)
        return model

    async def prepare(self, body: bytes, *, chat: bool) -> Prepared:
        """Raises Rejected."""
        call = read_call(body, chat=chat)
        if len(body) <= _INLINE_BYTES and self._longest_answer(call) <= _INLINE_TOKENS:
            return self._prepare(call, chat)
        return await asyncio.to_thread(self._prepare, call, chat)

    def tokenize(self, wanted: Tokenize) -> list[int]:
        """The ids of a text or a conversation. Takes its time. Raises Rejected."""
        if wanted.messages is None:
            return self._chat.encode(wanted.prompt or "", add_special_tokens=wanted.add_special_tokens is not False)
        return self._chat.encode(self._render(wanted), add_special_tokens=bool(wanted.add_special_tokens))

    def _longest_answer(self, call: Call) -> int:
        natural = self.max_model_tokens if call.ignore_eos else 2 * self._options.output_tokens
        return call.choices * min(natural, call.output_limit or natural)

    def _prepare(self, call: Call, chat: bool) -> Prepared:
        prepared = Prepared(call, lora=self.lora_of(call.model), block_size=self._options.block_size)
        if chat:
            text = self._render(call)
            prepared.prompts = [self._chat.encode(text, add_special_tokens=bool(call.add_special_tokens))]
        else:
            text = ""
            prepared.prompts, prepared.texts = self._completion_prompts(call)
        for prompt in prepared.prompts:
            limit = self._limit(call, len(prompt), chat=chat)
            for choice in range(call.choices):
                reply = self._tool_reply(call, text, limit) if chat else None
                prepared.add(prompt, reply or self._speech(call, prompt, limit, choice))
        return prepared

    def _render(self, call: Conversation) -> str:
        assert call.messages is not None
        try:
            return self._chat.render(
                call.messages,
                tools=call.tools,
                variables=call.variables(),
                add_generation_prompt=call.add_generation_prompt,
                continue_final_message=call.continue_final_message,
            )
        except Unrenderable as error:
            raise unrenderable(error, self._options.model) from error

    def _completion_prompts(self, call: Call) -> tuple[list[list[int]], list[str]]:
        """The prompts' ids, and what is to be echoed before each choice."""
        given = call.prompt
        batch = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        special = call.add_special_tokens is not False
        prompts = [self._prompt_ids(prompt, special=special) for prompt in batch]
        if not call.echo:
            return prompts, []
        texts = [self._chat.decode(ids) for ids in prompts]
        return prompts, [text for text in texts for _ in range(call.choices)]

    def _prompt_ids(self, prompt: object, *, special: bool) -> list[int]:
        if isinstance(prompt, str):
            return self._chat.encode(prompt, add_special_tokens=special)
        if not isinstance(prompt, list) or not all(isinstance(id, int) for id in prompt):
            raise refused("prompt must be a string, array of strings, array of tokens, or array of token arrays")
        stranger = next((id for id in prompt if not 0 <= id < self._chat.vocabulary_size), None)
        if stranger is not None:
            raise refused(f"Token id {stranger} is out of vocabulary")
        return prompt

    def _limit(self, call: Call, prompt: int, *, chat: bool) -> int:
        """How many tokens the answer may have. Raises Rejected when prompt and answer are too long."""
        most, wanted = self.max_model_tokens, call.output_limit
        if prompt < 1:
            raise refused("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
        if wanted is not None and wanted > most:
            message = f"max_tokens={wanted} cannot be greater than max_model_len={most}. Request fewer output tokens."
            raise refused(message, param="max_tokens", value=wanted)
        if prompt + (wanted or 1) > most:
            raise refused(
                f"This model's maximum context length is {most} tokens. However, you requested {wanted or 0} output "
                f"tokens and your prompt contains at least {prompt} input tokens, which exceeds this limit. Please "
                "reduce the length of the input prompt.",
                param="input_tokens",
                value=prompt,
            )
        return wanted or (most - prompt if chat else min(_COMPLETION_TOKENS, most - prompt))

    def _tool_reply(self, call: Call, text: str, limit: int) -> Reply | None:
        tool = wanted_tool(call)
        if tool is None:
            return None
        assert call.messages is not None
        try:
            reply = self._chat.call(text, call.messages, tool, tools=call.tools, variables=call.variables())
        except Unrenderable as error:
            raise unrenderable(error, self._options.model) from error
        if len(reply.ids) > limit:  # a call that is cut short is no call
            return Reply(reply.ids[:limit], reply.pieces[:limit], "length")
        if isinstance(call.tool_choice, dict):
            reply.finish = "stop"  # vLLM says tool_calls only where the model had a choice
        return reply

    def _speech(self, call: Call, prompt: Sequence[int], limit: int, choice: int) -> Reply:
        seed = xxh3_64_intdigest(array("I", prompt).tobytes(), self._options.seed + (call.seed or 0) % 2**32 + choice)
        mean = self._options.output_tokens
        stop = max(call.min_tokens or 0, mean // 2 + seed % mean)
        return self._chat.say(seed, at_most=limit, stop_after=None if call.ignore_eos else stop)
