"""Whom a request is from: by its key, wherever SDKs put it; or by a header, if another gateway vouches for it.

    Authorization: Bearer KEY    OpenAI's SDKs, and most others'
    x-api-key: KEY               Anthropic's
    api-key: KEY                 Azure's

Where there are no tenants the gateway is open, but only to its own machine. What a key looked like is never said,
neither to the client nor to a log.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from router.core import OPEN, Caller
from router.errors import Unauthenticated, WarmrouteError
from router.http.messages import Request
from router.http.proxies import TrustedProxies
from router.serving.callers import Callers
from router.store.keys import is_admin_key

log = logging.getLogger("warmroute")

_CREDENTIALS = frozenset((b"authorization", b"x-api-key", b"api-key"))
_BEARER = b"bearer "

NO_TENANTS = (
    "This gateway can be reached from other machines and has no tenants yet, so it serves nobody. Its operator makes a "
    "tenant, a project and a key, or sets auth.mode: open."
)


class IdentityHeader(NamedTuple):
    """name: in lower case. peers: whom it is believed; None: any client, since all have shown a certificate."""

    name: bytes
    peers: TrustedProxies | None


class Identity:
    """Call it with a request.

    needs_key  False: without tenants it is open. `private`: only its own machine, or who has a certificate, reaches it.
    refused    counts, by reason
    """

    def __init__(
        self, callers: Callers, *, needs_key: bool, private: bool, header: IdentityHeader | None = None
    ) -> None:
        self.refused: Counter[str] = Counter()
        self._callers = callers
        self._needs_key = needs_key
        self._private = private
        self._header = header
        self._mode = ""

    def __call__(self, request: Request) -> Caller:
        """Raises Unauthenticated and StoreUnavailable."""
        try:
            if not (self._needs_key or self._callers.had_tenants):
                return self._without_tenants()
            if self._header is not None and self._header.name in request.named:
                caller = self._by_header(request, self._header)
                if caller is not None:
                    return caller
            return self._callers.find(presented_key(request))
        except WarmrouteError as error:
            self.refused[str(error.code)] += 1
            raise

    def _without_tenants(self) -> Caller:
        self._callers.check()
        if self._private:
            return OPEN
        raise Unauthenticated(NO_TENANTS)

    def _by_header(self, request: Request, header: IdentityHeader) -> Caller | None:
        """None: it is from somebody who may not say so, and counts for nothing."""
        if header.peers is not None and not header.peers.trusts(request.peer):
            return None
        said = {value for name, value in request.head if name == header.name}
        caller = self._callers.tenant(said.pop().decode("utf-8", "replace")) if len(said) == 1 else None
        if caller is None:
            raise Unauthenticated("The tenant that was named is not known.")
        return caller

    def tenant(self, id_or_name: str) -> Caller | None:
        """For whom a request would be that names the tenant. Raises StoreUnavailable."""
        return self._callers.tenant(id_or_name)

    @property
    def mode(self) -> str:
        """keys; open; closed: it would be open, if others did not reach it; unknown: nothing was read yet."""
        if self._needs_key or self._callers.had_tenants:
            return "keys"
        if self._callers.had_tenants is None:
            return "unknown"
        return "open" if self._private else "closed"

    def figures(self) -> Mapping[str, float]:
        """For metrics."""
        return self._callers.figures()

    def state(self) -> dict[str, Any]:
        """For readiness."""
        note = {"open": "no tenants: open, to this machine only", "closed": NO_TENANTS}.get(self.mode)
        return {"mode": self.mode, **({"note": note} if note else {}), **self._callers.state()}

    async def refresh(self) -> None:
        """Takes up what has changed. The first tenant ends the open mode."""
        await self._callers.refresh()
        before, self._mode = self._mode, self.mode
        if self._mode == before:
            return
        if self._mode == "open":
            log.info("there are no tenants: open, to this machine only")
        elif self._mode == "closed":
            log.warning(NO_TENANTS)
        elif before in ("open", "closed"):
            log.info("there are tenants now: requests need keys")


def presented_key(request: Request) -> str:
    """The key that a request brings. Raises Unauthenticated for none, for two, and for an administrator's."""
    found = b""
    for name, value in request.head:
        if name not in _CREDENTIALS:
            continue
        key = value
        if name == b"authorization":
            key = value[len(_BEARER) :].strip() if value[: len(_BEARER)].lower() == _BEARER else b""
        if found and key and key != found:
            raise Unauthenticated("Two different API keys were given. Send one.")
        found = found or key
    if not found:
        raise Unauthenticated("No API key was given. Send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'.")
    shown = found.decode("latin-1")
    if is_admin_key(shown):
        raise Unauthenticated("An administrator's key runs no completions. Use a key of a project.")
    return shown
