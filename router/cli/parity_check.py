"""The parity check of `warmroute doctor`: does the gateway read a prompt as this engine does?"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from router.cli.checkup import PARITY, Finding, State
from router.config import Config
from router.core import Adapter, EngineFacts, Instance
from router.serving.prompt import check, load_prompts

_STATES: Mapping[str, State] = {"EXACT": "ok", "DEGRADED": "fail", "UNCHECKED": "warn"}
_MENDS = {
    "DEGRADED": "give the engine's own tokenizer directory and, if it runs with --chat-template, the same file; until "
    "then the engine tokenizes, or the model is placed by load",
    "UNCHECKED": "the engine has no /tokenize: predicted and delivered hits show whether the tokens agree",
}


async def check_parity(config: Config, instance: Instance, facts: EngineFacts, adapter: Adapter) -> Finding:
    """Renders and tokenizes the probe set here and there. Skipped where the engine tokenizes anyway."""
    served = instance.served or facts.served[0]
    name = instance.model or config.aliases.get(served, served)
    settings = config.model(name)
    tokenizer = settings.tokenizer or _readable(facts.model_path)
    if tokenizer in ("engine", "none"):
        return Finding(PARITY, instance.id, "skip", f"tokenizer: {tokenizer}")
    if tokenizer is None:
        mend = f"set models.{name}.tokenizer to a directory with the model's tokenizer.json: it is faster"
        return Finding(PARITY, instance.id, "skip", "no tokenizer here: the engine tokenizes", mend)

    async def engine_tokenize(path: str, body: Mapping[str, Any]) -> list[int]:
        return await adapter.tokenize(instance, path, body)

    with ThreadPoolExecutor(1) as executor:
        prompts = await asyncio.to_thread(
            load_prompts,
            name,
            tokenizer=tokenizer,
            secret=b"doctor",  # keys made here are compared with nobody's
            block_sizes=tuple,
            executor=executor,
            chat_template=settings.chat_template,
            template_variables=settings.chat_template_kwargs,
            dialect=adapter.name,
        )
        parity = await check(prompts, engine_tokenize)
    seen = parity.reason + (f", as {parity.dialect} renders" if parity.dialect else "")
    return Finding(PARITY, instance.id, _STATES[parity.state], seen, _MENDS.get(parity.state, ""))


def _readable(model_path: str | None) -> str | None:
    return model_path if model_path and (Path(model_path) / "tokenizer.json").is_file() else None
