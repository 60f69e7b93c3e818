"""Any server that speaks the OpenAI API: TGI, transformers serve, llama.cpp, an outside provider.

They tell little: a capacity sometimes, no load, no KV events unless the operator names sources in vLLM's format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adapters._answers import Kind, Models, kind_of, number, read_tokens, single_prompt, text
from adapters._base import EngineAdapter
from router.core import EngineFacts, Instance, Load, Upstream
from router.errors import EngineProtocolError, EngineUnreachable

_NOTHING = Upstream()


class OpenAIAdapter(EngineAdapter):
    name = "openai"

    async def recognises(self, instance: Instance) -> float:
        """How surely there is an OpenAI API at `instance.url`. Low, since the more special adapters find one too."""
        return 0.1 if await self._owner(instance) is not None else 0.0

    async def inspect(self, instance: Instance) -> EngineFacts:
        models, notes = await self._models_or_configured(instance)
        slots = await self._optional(instance, "/slots")  # llama.cpp
        info = await self._optional(instance, "/info")  # TGI
        slots = [slot for slot in slots if type(slot) is dict] if type(slots) is list else []
        contexts = [number(slot, "n_ctx") or 0 for slot in slots]
        info = info if type(info) is dict else {}
        return EngineFacts(
            served=models.served,
            loras=models.loras,
            version=text(info, "version"),
            max_model_tokens=models.max_model_tokens or number(info, "max_total_tokens") or min(contexts, default=None),
            block_size=instance.block_size,
            capacity_tokens=instance.capacity_tokens or number(info, "max_batch_total_tokens") or sum(contexts) or None,
            max_running_requests=len(slots) or number(info, "max_concurrent_requests") or None,
            ranks=max(1, len(instance.events or ())),
            sources=instance.events or (),
            model_path=models.root,
            open_without_key=await self._is_open(instance),
            notes=notes,
        )

    async def load(self, instance: Instance) -> Mapping[int, Load]:
        """An empty load, if the engine answers at all; one that has no /health answers with some 4xx."""
        if await self._http.status(instance, "/health") >= 500:
            raise EngineUnreachable("the engine is not healthy")
        return {0: Load(at=self._clock())}

    async def tokenize(self, instance: Instance, path: str, body: Mapping[str, Any]) -> list[int]:
        if kind_of(path) is Kind.CHAT:
            return await self._tokenize_chat(instance, body)
        prompt = single_prompt(body)
        return await self._tokenize_text(instance, prompt) if isinstance(prompt, str) else prompt

    def upstream(self, instance: Instance, rank: int | None) -> Upstream:
        return _NOTHING

    async def _models_or_configured(self, instance: Instance) -> tuple[Models, tuple[str, ...]]:
        """transformers serve answers /v1/models with a 500 when it has no network, and works all the same."""
        try:
            return await self._models(instance), ()
        except EngineProtocolError:
            if await self._http.status(instance, "/health") != 200:
                raise
        served = instance.served or instance.model
        return Models((served,), (), None, None, None), (f"/v1/models does not answer: {served!r} is taken on trust",)

    async def _optional(self, instance: Instance, path: str) -> Any:
        try:
            return await self._http.json(instance, path)
        except EngineProtocolError:  # a route of that name which is something else
            return None

    async def _tokenize_chat(self, instance: Instance, body: Mapping[str, Any]) -> list[int]:
        request = {field: body[field] for field in ("messages", "tools", "chat_template_kwargs") if body.get(field)}
        answer = await self._http.post(instance, "/tokenize", request)
        if answer is not None and (tokens := read_tokens(answer)):
            return tokens
        rendered = await self._http.post(instance, "/apply-template", request)  # llama.cpp
        prompt = text(rendered, "prompt") if type(rendered) is dict else None
        if prompt is None:
            raise EngineProtocolError("the engine does not tokenize chats")
        return await self._tokenize_text(instance, prompt)

    async def _tokenize_text(self, instance: Instance, prompt: str) -> list[int]:
        # vLLM's form and llama.cpp's in one: each takes its own field and does not mind the other.
        request = {"prompt": prompt, "content": prompt, "add_special": True, "parse_special": True}
        answer = await self._http.post(instance, "/tokenize", request)
        if answer is None:
            raise EngineProtocolError("the engine does not tokenize")
        return read_tokens(answer)
