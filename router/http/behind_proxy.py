"""A client's connection that a load balancer opened for it and introduced with the PROXY protocol."""

from __future__ import annotations

import asyncio
from collections import Counter

from router.http.connection import Handler, Refuser, ServerProtocol
from router.http.messages import Limits, Refusal
from router.http.outbox import Outbox
from router.http.proxies import TrustedProxies, read_preamble


class ServerProtocolBehindProxy(ServerProtocol):
    """From a trusted peer the PROXY header is required: guessing whether it is there would let clients write it.

    From any other peer it is not valid HTTP, and refused as such.
    """

    __slots__ = ("_preamble", "_trusted")

    def __init__(
        self,
        trusted: TrustedProxies,
        handler: Handler,
        limits: Limits,
        connections: set[ServerProtocol],
        *,
        refused: Counter[int] | None = None,
        refuser: Refuser | None = None,
        outbox: Outbox | None = None,
    ) -> None:
        super().__init__(handler, limits, connections, refused=refused, refuser=refuser, outbox=outbox)
        self._trusted = trusted
        self._preamble: bytes | None = None  # what has come of the header; None: none is due

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._trusted.trusts(self._peer):
            self._preamble = b""

    def data_received(self, data: bytes) -> None:
        if self._preamble is not None and not self._deaf:
            data = self._after_preamble(self._preamble + data)
            if not data:
                return
        super().data_received(data)

    def _after_preamble(self, data: bytes) -> bytes:
        try:
            preamble = read_preamble(data)
        except Refusal as refusal:
            self._preamble = None
            self._refuse(refusal)
            self._advance()
            return b""
        if preamble is None:
            self._preamble = data
            return b""
        self._preamble = None
        if preamble.address is not None:
            self._peer = preamble.address
            self._reader.peer = preamble.address
        return data[preamble.size :]

    def _sweep_reader(self, elapsed: float) -> None:
        if self._preamble is not None and self._waited > self._limits.head_s:
            self._close()
        else:
            super()._sweep_reader(elapsed)
