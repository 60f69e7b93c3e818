"""Instances behind a name: a Kubernetes headless service, or any name with an address for each engine."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from router.errors import EngineUnreachable

Lookup = Callable[[str, int], Awaitable[Sequence[tuple[Any, ...]]]]

_NO_ADDRESS = frozenset((socket.EAI_NONAME, socket.EAI_NODATA))  # no such name; a name without addresses


async def _getaddrinfo(name: str, port: int) -> Sequence[tuple[Any, ...]]:
    return await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)


class DnsDiscovery:
    """`lookup` stands in for the system's resolver in tests."""

    def __init__(
        self, name: str, port: int, *, every_s: float = 10.0, scheme: str = "http", lookup: Lookup = _getaddrinfo
    ) -> None:
        self._name = name
        self._port = port
        self._every_s = every_s
        self._scheme = scheme
        self._lookup = lookup

    async def resolve(self) -> set[str]:
        """The URLs of all addresses, none if the name has none now. Raises `EngineUnreachable` when DNS fails."""
        try:
            found = await self._lookup(self._name, self._port)
        except socket.gaierror as error:
            if error.errno in _NO_ADDRESS:
                return set()
            raise EngineUnreachable("the engines' name cannot be resolved", detail=self._name) from None
        return {self._url(address[0]) for *_, address in found}

    async def changes(self) -> AsyncGenerator[set[str]]:
        """The URLs now, and again whenever they differ. A failing DNS server keeps the last answer: it is no proof
        that the engines are gone."""
        last: set[str] | None = None
        now: set[str] | None = None
        while True:
            with suppress(EngineUnreachable):
                now = await self.resolve()
            if now is not None and now != last:
                last = now
                yield now
            await asyncio.sleep(self._every_s)

    def _url(self, host: str) -> str:
        return f"{self._scheme}://[{host}]:{self._port}" if ":" in host else f"{self._scheme}://{host}:{self._port}"
