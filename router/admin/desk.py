"""What the handlers of tenants, keys, limits … share: one way to read, to list, to change, and to answer.

An object is `{"id", "object", …columns}`; a list is `{"object": "list", "data", "has_more", "first_id", "last_id"}`, to
be gone on with by `after=LAST_ID`. What is archived is left out unless `archived=true`. A POST with an Idempotency-Key
is done once: the same again gets the same answer for a day, anything else under that key 409.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator

from router.admin.access import Administrator
from router.errors import BadRequest, Conflict, UnknownObject
from router.store import replays
from router.store.database import Database
from router.store.edits import Edit, edit
from router.store.records import Table, list_page, owner, read_one

_INTERNAL = frozenset(("mac", "revision"))
_LONGEST_KEY = 255

After = Annotated[str | None, Query(description="the last id of the page before")]
Limit = Annotated[int, Query(ge=1, le=100)]
Archived = Annotated[bool, Query(description="also what is archived")]
Moment = Annotated[float, Field(ge=0, lt=2.5e11, description="seconds since 1970")]


class Body(BaseModel):
    """What a request may say; anything else is refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nul(cls, value: Any) -> Any:
        if _has_nul(value):
            raise ValueError("a text has a NUL character")
        return value

    def given(self) -> dict[str, Any]:
        """Only what the client wrote, for PATCH."""
        return self.model_dump(exclude_unset=True, mode="json")


class Desk:
    """audit_secret: what the audit log is chained with. pepper: what keys are hashed with."""

    def __init__(
        self, database: Database, *, audit_secret: bytes, pepper: bytes, clock: Callable[[], float] = time.time
    ) -> None:
        self.database = database
        self.audit_secret = audit_secret
        self.pepper = pepper
        self.clock = clock

    # -- reading

    async def one(self, table: Table, object_id: str, who: Administrator) -> dict[str, Any]:
        """Raises UnknownObject, also for what belongs to a tenant the administrator may not see."""
        row = await read_one(self.database, table, object_id)
        if row is None or not who.of(owner(table, row)):
            raise UnknownObject(f"There is no {table.name.rstrip('s')} {object_id[:80]!r}.")
        return row

    async def list(
        self,
        table: Table,
        who: Administrator,
        *,
        after: str | None,
        limit: int,
        archived: bool = True,
        **equal: object,
    ) -> dict[str, Any]:
        """`equal`: columns and the values they must have; None: any."""
        rows, has_more = await list_page(
            self.database, table, tenant=who.tenant, equal=equal, archived=archived, after=after, limit=limit
        )
        return listing([shown(table, row) for row in rows], has_more=has_more)

    # -- changing

    def edit(self, who: Administrator) -> AbstractAsyncContextManager[Edit]:
        return edit(self.database, actor=who.actor, secret=self.audit_secret, clock=self.clock)

    async def create(
        self, request: Request, who: Administrator, build: Callable[[Edit], Awaitable[dict[str, Any]]]
    ) -> JSONResponse:
        """201 with what `build` makes; its `key`, if it has one, is never kept."""
        key = request.headers.get("idempotency-key")
        if key is not None and not 0 < len(key) <= _LONGEST_KEY:
            raise BadRequest("Idempotency-Key must have 1 to 255 characters.", param="Idempotency-Key")
        digest = hashlib.sha256(f"{request.method} {request.url.path}\n".encode() + await request.body()).digest()
        async with self.edit(who) as edit:
            before = None if key is None else await replays.find(edit, key, digest)
            if before is not None:
                return JSONResponse(json.loads(before.body), before.status, {"idempotent-replayed": "true"})
            answer = await build(edit)
            if key is not None:
                kept = json.dumps({**answer, "key": None} if "key" in answer else answer)
                await replays.keep(edit, key, digest, replays.Answered(201, kept))
        return JSONResponse(answer, 201)

    async def change(
        self, table: Table, object_id: str, who: Administrator, values: Mapping[str, Any], *, action: str = "update"
    ) -> dict[str, Any]:
        """PATCH: what is given, of an object that is not archived."""
        before = await self.one(table, object_id, who)
        if before.get("archived_at") is not None:
            raise Conflict("It is archived.")
        async with self.edit(who) as edit:
            return shown(table, await edit.update(table, f"{noun(table)}.{action}", before, values))

    async def archive(self, table: Table, object_id: str, who: Administrator) -> dict[str, Any]:
        """DELETE: it works no more, and what it did stays in the books. Again: as before."""
        before = await self.one(table, object_id, who)
        if before["archived_at"] is not None:
            return shown(table, before)
        async with self.edit(who) as edit:
            row = await edit.update(table, f"{noun(table)}.archive", before, {"archived_at": edit.at})
        return shown(table, row)


def _has_nul(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_has_nul(part) for pair in value.items() for part in pair)
    return "\0" in value if isinstance(value, str) else isinstance(value, list) and any(map(_has_nul, value))


async def refuse_nul(request: Request) -> None:
    """PostgreSQL has no texts with NUL, so that nothing can be called so. Raises BadRequest."""
    if "\0" in request.url.path or any(map(_has_nul, request.query_params.values())):
        raise BadRequest("The URL has a NUL character.")


def noun(table: Table) -> str:
    return table.name.rstrip("s")


def shown(table: Table, row: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: value for name, value in row.items() if name not in _INTERNAL and name != "id"}
    return {"id": row["id"], "object": noun(table), **fields}


def listing(rows: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": rows,
        "has_more": has_more,
        "first_id": rows[0]["id"] if rows else None,
        "last_id": rows[-1]["id"] if rows else None,
    }
