"""Who has which key: all of them in memory, so that a request costs an HMAC and a look into a dict, and no query.

They are read whole at the start; then the database is asked again and again for its revision, and for what is newer
than the one that is known. So a revoked key ends everywhere within that time. What is known is never overwritten by
something older: a database that has gone back in time counts as away, and is read anew once it has caught up.

While the database is away known keys go on for `stale_s`; an unknown key may just have been made, so it is answered
with 503, not 401.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Mapping
from math import inf
from typing import Any, NamedTuple

from router.core import Caller
from router.errors import StoreUnavailable, Unauthenticated, WarmrouteError
from router.store import callers as stored
from router.store.callers import KeyRow, TenantRow
from router.store.database import Database
from router.store.keys import key_mac

log = logging.getLogger("warmroute")

MOST_KEYS = 1_000_000
"""Further ones are left out, and answered with 503."""

_SKEW_S = 5.0
"""Clocks of gateways and of whoever revokes a key differ: an end that lies no further ahead has come."""

_CHECK_S = 2.0
_READ_S = 120.0
_RETRY_AFTER_S = 1.0

SaltOf = Callable[[str], str | None]
"""What engines are told as cache_salt for a domain of isolation. None: nothing keeps its cache apart."""


class Tenant(NamedTuple):
    """caller: of requests that name the tenant, and no key of it."""

    row: TenantRow
    caller: Caller


class Known(NamedTuple):
    """until: wall clock."""

    caller: Caller
    until: float


class Roll:
    """What is known as of a revision; -1: nothing yet."""

    def __init__(self, salt_of: SaltOf) -> None:
        self.revision = -1
        self.tenants: dict[str, Tenant] = {}  # by id; archived ones stay
        self.keys = 0
        self.left_out = 0
        self._ids: dict[str, str] = {}  # of tenants, by name
        self._known: list[dict[bytes, Known]] = [{} for _ in range(256)]  # by HMAC; one large dict stalls as it grows
        self._salt_of = salt_of

    def tenant(self, id_or_name: str) -> Tenant | None:
        return self.tenants.get(id_or_name) or self.tenants.get(self._ids.get(id_or_name, ""))

    def find(self, mac: bytes) -> Known | None:
        return self._known[mac[0]].get(mac)

    def take_tenant(self, row: TenantRow) -> None:
        before = self.tenants.get(row.id)
        if before is not None and self._ids.get(before.row.name) == row.id:
            del self._ids[before.row.name]
        self._ids[row.name] = row.id
        domain = domain_of(row.isolation, tenant=row.id, key=row.id)
        caller = Caller(
            tenant=row.id,
            domain=domain,
            salt=self._salt_of(domain),
            priority=row.priority,
            steers=row.steers,
            labels=row.labels,
        )
        self.tenants[row.id] = Tenant(row, caller)

    def take_key(self, row: KeyRow, now: float) -> None:
        """Its tenant was taken before. Of a key that has ended nothing is kept."""
        known = self._known[row.mac[0]]
        if row.until <= now + _SKEW_S:
            self.keys -= known.pop(row.mac, None) is not None
            return
        if row.mac not in known:
            if self.keys >= MOST_KEYS:
                self.left_out += 1
                return
            self.keys += 1
        tenant = self.tenants[row.tenant].caller
        domain, salt = tenant.domain, tenant.salt
        if self.tenants[row.tenant].row.isolation == "key":
            domain = domain_of("key", tenant=row.tenant, key=row.id)
            salt = self._salt_of(domain)
        caller = Caller(  # by position, and what many have in common once
            tenant.tenant,
            sys.intern(row.project),
            row.id,
            domain,
            salt,
            None if row.models is None else frozenset(map(sys.intern, row.models)),
            tenant.priority,
            tenant.steers,
            tenant.labels,
        )
        known[row.mac] = Known(caller, row.until)


def domain_of(isolation: str, *, tenant: str, key: str) -> str:
    """`tenant:ID`, `key:ID`, `group:NAME` or `shared`."""
    if isolation == "tenant":
        return f"tenant:{tenant}"
    return f"key:{key}" if isolation == "key" else isolation


class Callers:
    """`find` is for the request's path; `refresh`, again and again, keeps it fresh.

    had_tenants   whether there has ever been one; None: nothing was read yet
    """

    def __init__(
        self,
        database: Database,
        *,
        pepper: bytes,
        salt_of: SaltOf,
        refresh_s: float,
        stale_s: float,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.had_tenants: bool | None = None
        self._database = database
        self._pepper = pepper
        self._salt_of = salt_of
        self._stale_s = stale_s
        self._away_s = 2 * refresh_s + _CHECK_S  # a check that hangs is given up by then
        self._clock = clock
        self._wall_clock = wall_clock
        self._roll = Roll(salt_of)
        self._fresh_at = -inf  # what is known was so at this time, by `clock`
        self._away = True
        self._anew = True  # read all of it
        self._said = ""  # the state that was logged last
        self._refreshing = asyncio.Lock()

    def find(self, key: str) -> Caller:
        """Raises Unauthenticated, and StoreUnavailable for what cannot be known now."""
        age = self._clock() - self._fresh_at
        if age > self._stale_s:
            raise _unavailable()
        known = self._roll.find(key_mac(self._pepper, key))
        if known is not None and known.until > self._wall_clock():
            return known.caller
        if known is None and (self._away or age > self._away_s or self._roll.left_out):
            raise _unavailable()
        raise Unauthenticated("Incorrect API key provided.")

    def tenant(self, id_or_name: str) -> Caller | None:
        """Whom a request is from that names its tenant. None: there is none, or none any more.

        Raises StoreUnavailable.
        """
        self.check()
        tenant = self._roll.tenant(id_or_name)
        if tenant is None and self._away:
            raise _unavailable()
        return tenant.caller if tenant is not None and tenant.row.until > self._wall_clock() + _SKEW_S else None

    def check(self) -> None:
        """Raises StoreUnavailable where what is known is too old to go by."""
        if self.is_stale:
            raise _unavailable()

    @property
    def is_stale(self) -> bool:
        return self._clock() - self._fresh_at > self._stale_s

    def state(self) -> dict[str, Any]:
        """For readiness. `database`: ok, away (known keys go on), stale (none does), unread."""
        age = self._clock() - self._fresh_at
        state = "away" if self._away or age > self._away_s else "ok"
        if age > self._stale_s:
            state = "unread" if self._roll.revision < 0 else "stale"
        return {
            "database": state,
            "read_s_ago": None if age == inf else round(age, 3),
            "revision": self._roll.revision,
            "tenants": len(self._roll.tenants),
            "keys": self._roll.keys,
        }

    def figures(self) -> Mapping[str, float]:
        """For metrics."""
        state = self.state()
        age = state["read_s_ago"]
        return {
            "keys": state["keys"],
            "tenants": state["tenants"],
            "store_up": float(state["database"] == "ok"),
            "store_read_age_seconds": inf if age is None else age,
        }

    # --- keeping it fresh

    async def refresh(self) -> None:
        """Takes up what has changed. A database that cannot be read is logged, once, and shown in `state`."""
        async with self._refreshing:
            try:
                await self._catch_up()
            except TimeoutError:
                self._note("it does not answer in time")
            except WarmrouteError as error:
                self._note(error.detail or "it cannot be reached")
            except Exception as unexpected:  # e.g. tables that are missing
                self._note(f"{type(unexpected).__name__}; are its tables there? See `warmroute db`")
            else:
                self._note("")

    async def _catch_up(self) -> None:
        for _ in range(2):  # reading it all takes seconds, in which more may change
            asked_at = self._clock()
            async with asyncio.timeout(_CHECK_S):
                revision = await stored.revision(self._database)
            known = self._roll.revision
            if revision < known:
                self._anew = True
                raise StoreUnavailable("", detail="it is older than what was read before")
            is_new = self._anew or revision > known
            if is_new:
                async with asyncio.timeout(_READ_S):
                    await self._read(None if self._anew else known)
                self._anew = False
            self._fresh_at = asked_at
            if not is_new:
                return

    async def _read(self, after: int | None) -> None:
        """Some rows at a time, so that the loop has its turns."""
        roll = Roll(self._salt_of) if after is None else self._roll
        now = self._wall_clock()
        async with stored.snapshot(self._database) as snapshot:
            async for tenants in snapshot.tenants(after):
                for tenant in tenants:
                    roll.take_tenant(tenant)
            async for keys in snapshot.keys(after, now=now):
                for key in keys:
                    roll.take_key(key, now)
            roll.revision = snapshot.revision
            if after is None:  # what asks for changes is compiled now, and not amid requests
                _ = [row async for row in snapshot.tenants(roll.revision)]
                _ = [row async for row in snapshot.keys(roll.revision)]
        self._roll = roll
        self.had_tenants = bool(self.had_tenants or roll.tenants)
        if roll.left_out:
            log.error("there are more than %d keys: %d of them are not known here", MOST_KEYS, roll.left_out)

    def _note(self, fault: str) -> None:
        self._away = bool(fault)
        before, self._said = self._said, str(self.state()["database"])
        if self._said == before:
            return
        if fault and self._said == "away":
            log.warning("the database is away (%s): known keys work for %g s more", fault, self._stale_s)
        elif fault:
            log.error("the database cannot be read (%s): all requests get 503 until it can", fault)
        elif before:
            log.info("the database is back")


def _unavailable() -> StoreUnavailable:
    return StoreUnavailable("Keys cannot be checked at the moment; try again.", retry_after_s=_RETRY_AFTER_S)
