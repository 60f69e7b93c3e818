"""The configured engines as the commands meet them: addresses resolved, each with the adapter that knows its kind."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from router import plugins
from router.config import Config, Engine
from router.core import Adapter, Instance
from router.errors import EngineError
from router.roster import recognise

RESOLVE_S = 5.0
UNKNOWN = ""
"""The model of an instance whose engine has not been asked yet."""


class Known(NamedTuple):
    """An engine, and the adapter to talk to it; None, with the reason, when there is none."""

    instance: Instance
    adapter: Adapter | None
    why_not: str = ""


async def known_engines(config: Config, adapters: dict[str, Any]) -> list[Known]:
    """Every address of every configured engine. `adapters` grows by those named as module:attr."""
    found = []
    for engine in config.engines:
        urls = await _addresses(engine)
        if not urls:
            nowhere = engine.instance(engine=engine.kind, model=engine.model or UNKNOWN)
            found.append(Known(nowhere, None, "the name cannot be resolved"))
        found += [await _known(engine, url, adapters) for url in sorted(urls)]
    return found


async def _addresses(engine: Engine) -> set[str]:
    if not engine.discovered:
        return {engine.url}
    scheme, _, rest = engine.url.partition("+")
    parts = urlsplit(rest)
    discovery = plugins.load(plugins.DISCOVERY, scheme)(parts.hostname, parts.port, scheme=parts.scheme)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(RESOLVE_S), contextlib.aclosing(discovery.changes()) as changes:
            urls: set[str] = await anext(changes)
            return urls
    return set()


async def _known(engine: Engine, url: str, adapters: dict[str, Any]) -> Known:
    try:
        kind = await recognise(engine, url, adapters)
    except EngineError as error:
        return Known(engine.instance(engine=engine.kind, model=engine.model or UNKNOWN, url=url), None, error.message)
    if kind not in adapters:  # "module:attr"
        adapters[kind] = plugins.load(plugins.ADAPTERS, kind)()
    return Known(engine.instance(engine=kind, model=engine.model or UNKNOWN, url=url), adapters[kind])
