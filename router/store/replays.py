"""Answers to POSTs with an Idempotency-Key, kept for a day."""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import delete, insert, select

from router.errors import Conflict
from router.store.edits import Edit
from router.store.schema import idempotency

_KEPT_S = 86_400.0


class Answered(NamedTuple):
    status: int
    body: str


async def find(edit: Edit, key: str, request: bytes) -> Answered | None:
    """What was answered under this key before. request: its digest; Conflict is raised where it was another one."""
    await edit.connection.execute(delete(idempotency).where(idempotency.c.at < edit.at - _KEPT_S))
    mine = (idempotency.c.actor == edit.actor, idempotency.c.key == key)
    found: Any = (await edit.connection.execute(select(idempotency).where(*mine))).first()
    if found is None:
        return None
    if bytes(found.request) != request:
        raise Conflict("This Idempotency-Key was used for another request.", code="idempotency_key_reused")
    return Answered(found.status, found.body)


async def keep(edit: Edit, key: str, request: bytes, answered: Answered) -> None:
    row = {"actor": edit.actor, "key": key, "request": request, "at": edit.at, **answered._asdict()}
    await edit.connection.execute(insert(idempotency).values(row))
