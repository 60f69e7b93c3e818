"""Who may do what on port 4001.

A caller is an admin key (`sk-admin-…`), the bootstrap key of the configuration, or a JWT of the identity provider. What
it may do are scopes, `AREA:read` and `AREA:write`; `*` is all of them, and writing includes reading. A key that belongs
to a tenant sees that tenant's objects and no others: theirs are answered as if they were not there.

Inference keys are refused here, and admin keys on port 4000. Each route names its scope where it is declared; one that
names none does not start (`tests/router/admin/test_access.py` goes through all).
"""

from __future__ import annotations

import hmac
import re
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer

from router.errors import Forbidden, Unauthenticated
from router.store import admin_keys
from router.store.database import Database
from router.store.keys import key_mac

AREAS = (
    "fleet",
    "decisions",
    "instances",
    "config",
    "tenants",
    "keys",
    "limits",
    "prices",
    "reports",
    "audit",
    "isolation",
)
SCOPES = frozenset(("*", *(f"{area}:{right}" for area in AREAS for right in ("read", "write"))))

ADMIN_KEY = HTTPBearer(
    scheme_name="admin_key",
    bearerFormat="sk-admin-… or a JWT",
    description="An admin key, the bootstrap key or a JWT; also taken from x-api-key and api-key. Each route names the"
    " scope it needs; AREA:write includes AREA:read, and * is all. Needed from the first admin key on, and beyond"
    " loopback.",
    auto_error=False,
)
INFERENCE_KEY = HTTPBearer(
    scheme_name="inference_key",
    bearerFormat="sk-…",
    description="A key for completions, which sees its own usage; also taken from x-api-key and api-key.",
    auto_error=False,
)
"""For the OpenAPI schema; keys are read by `presented`."""

_BEARER = re.compile(r"Bearer +(\S+)", re.IGNORECASE)
_NO_KEY = "An admin key is needed: Authorization: Bearer sk-admin-…"
_NOT_VALID = "This is no valid admin key."

Tokens = Callable[[str], Awaitable["Administrator | None"]]
"""Who a JWT speaks for; None: it is none that counts."""


class Administrator(msgspec.Struct, frozen=True):
    """actor: as the audit log has it. tenant: the only one it may see; None: all."""

    actor: str
    scopes: frozenset[str]
    tenant: str | None = None

    def may(self, scope: str) -> bool:
        area, _, right = scope.partition(":")
        return "*" in self.scopes or scope in self.scopes or (right == "read" and f"{area}:write" in self.scopes)

    def of(self, tenant: str | None) -> bool:
        """Whether it may see what belongs to a tenant; None: what belongs to nobody."""
        return self.tenant is None or self.tenant == tenant


ANYBODY = Administrator("open", frozenset("*"))
"""On loopback, as long as there has never been an admin key."""


class Access:
    """Finds the administrator of a request.

    database: None where there is none. open: as long as there has never been an admin key, anybody may do anything.
    """

    def __init__(
        self,
        database: Database | None,
        *,
        pepper: bytes,
        bootstrap_key: str | None = None,
        tokens: Tokens | None = None,
        open: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._pepper = pepper
        self._bootstrap_key = bootstrap_key
        self._tokens = tokens
        self._open = open
        self._clock = clock
        self._everybody = ANYBODY

    @classmethod
    def of(cls, actor: str) -> Access:
        """Whoever asks is this one, and may do everything: who may open the database needs no key."""
        access = cls(None, pepper=b"")
        access._everybody = Administrator(actor, ANYBODY.scopes)
        return access

    async def administrator(self, request: Request) -> Administrator:
        """Raises Unauthenticated, and Forbidden for an inference key."""
        key = presented(request)
        if key is None:
            if self._open and not await self._has_keys():
                return self._everybody
            raise Unauthenticated(_NO_KEY)
        if self._bootstrap_key is not None and hmac.compare_digest(key.encode(), self._bootstrap_key.encode()):
            return Administrator("bootstrap", frozenset("*"))
        if self._tokens is not None and key.count(".") == 2:
            found = await self._tokens(key)
            if found is not None:
                return await self._of_tenant_there(found)
        return await self._of_key(key)

    async def _of_tenant_there(self, found: Administrator) -> Administrator:
        """An archived tenant ends its administrators, whoever vouches for them."""
        tenant, database = found.tenant, self._database
        if tenant is not None and database is not None and not await admin_keys.has_tenant(database, tenant):
            raise Unauthenticated(_NOT_VALID)
        return found

    async def _of_key(self, key: str) -> Administrator:
        found = None
        if self._database is not None:
            found = await admin_keys.find(self._database, key_mac(self._pepper, key), now=self._clock())
        if found is None:
            raise Unauthenticated(_NOT_VALID)
        if found.kind != "admin":
            raise Forbidden("A key for completions does not open the admin API.")
        return Administrator(found.id, frozenset(found.scopes), found.tenant)

    async def _has_keys(self) -> bool:
        if self._bootstrap_key is not None or self._tokens is not None:
            return True
        return self._database is not None and await admin_keys.exist(self._database)


def presented(request: Request) -> str | None:
    """The key of a request, wherever SDKs put it. Raises Unauthenticated for two that differ."""
    found = {request.headers[name] for name in ("x-api-key", "api-key") if name in request.headers}
    authorization = request.headers.get("authorization")
    if authorization is not None:
        match = _BEARER.fullmatch(authorization.strip())
        if match is None:
            raise Unauthenticated("Authorization must be: Bearer, and the key.")
        found.add(match[1])
    if len(found) > 1:
        raise Unauthenticated("The request has two keys that differ.")
    return found.pop() if found else None


class Needs:
    """A dependency of a route: `Depends(needs("keys:write"))` gives its Administrator, who has that scope."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def __call__(self, scope: str, *, all_tenants: bool = False) -> Any:
        """`all_tenants`: not for one that is bound to a tenant, since what the route shows is everybody's."""
        if scope not in SCOPES:
            raise ValueError(f"no such scope: {scope}")

        async def check(request: Request, _: Annotated[object, Depends(ADMIN_KEY)]) -> Administrator:
            who = await self._access.administrator(request)
            if not who.may(scope):
                raise Forbidden(f"This needs the scope {scope}.", code="missing_scope")
            if all_tenants and who.tenant is not None:
                raise Forbidden("This shows all tenants, and the key belongs to one.", code="tenant_key")
            return who

        check.scope = scope  # type: ignore[attr-defined]  # looked for by the test of all routes
        return Security(check, scopes=[scope])
