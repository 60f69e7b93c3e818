"""Whether an engine publishes its KV events where it serves.

An engine says itself where its events are. One that named another's would be credited with what that one holds, and its
tokens would be read by us; so what an engine names has to be at its own host. What the operator names is believed.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from msgspec.structs import replace

from router.core import EventSource

_LOOPBACK = frozenset(("127.0.0.1", "localhost", "::1"))
_RESOLVE_S = 2.0


async def at_home(sources: Sequence[EventSource], url: str) -> tuple[tuple[EventSource, ...], tuple[str, ...]]:
    """The sources at the host of `url`, without a replay that is elsewhere; and what was left out, with the mend."""
    kept: list[EventSource] = []
    notes: list[str] = []
    for source in sources:
        if not await _is_at(source.endpoint, url):
            notes.append(_note("KV events", source.endpoint))
            continue
        if source.replay is not None and not await _is_at(source.replay, url):
            notes.append(_note("KV event replay", source.replay))
            source = replace(source, replay=None)
        kept.append(source)
    return tuple(kept), tuple(dict.fromkeys(notes))


def _note(what: str, endpoint: str) -> str:
    host = urlsplit(endpoint).hostname or endpoint
    return f"{what} at {host}, which is not the engine's host, are not believed: name the sources in engines[].events"


async def _is_at(endpoint: str, url: str) -> bool:
    parts, home = urlsplit(endpoint), urlsplit(url).hostname or ""
    if parts.scheme != "tcp":
        return home in _LOOPBACK  # ipc:// is on this machine
    host = parts.hostname or ""
    if host == home or {host, home} <= _LOOPBACK:
        return True
    theirs, ours = await _addresses(host), await _addresses(home)
    if theirs & ours:
        return True
    return home in _LOOPBACK and bool(theirs) and all(map(_is_of_this_machine, theirs))


async def _addresses(host: str) -> set[str]:
    try:
        async with asyncio.timeout(_RESOLVE_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, UnicodeError):
        return set()
    return {str(address[0]) for *_, address in found}


def _is_of_this_machine(address: str) -> bool:
    """vLLM since 0.31 publishes `tcp://*:0` at the machine's address, even if it serves on loopback alone."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
