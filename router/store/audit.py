"""The audit log: who changed what. Tamper-evident, since each row carries an HMAC over itself and the one before it.

    mac_n = HMAC-SHA256(secret, mac_{n-1} ‖ canonical JSON of row n)         mac_0 = 32 zero bytes

The secret is not in the database, so whoever can write there cannot make a chain that holds. What was cut off at the
end shows only against a `Head` that was kept elsewhere: export one now and then.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from sqlalchemy import insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from router.store.schema import audit

_BEGINNING = bytes(32)
_PAGE = 1000


class Head(NamedTuple):
    """The last row: its number, 0 for an empty log, and its mac in hex."""

    number: int
    mac: str


class Verdict(NamedTuple):
    """head: as far as the chain holds. broken: what is wrong after it; "" for nothing."""

    head: Head
    broken: str


async def append(connection: AsyncConnection, secret: bytes, **row: Any) -> None:
    """Inside a transaction that keeps others from appending (`edits.py`)."""
    last = await connection.execute(select(audit.c.number, audit.c.mac).order_by(audit.c.number.desc()).limit(1))
    found = last.first()
    number, before = (0, _BEGINNING) if found is None else (found.number, found.mac)
    row = _as_stored({"number": number + 1, **row})
    await connection.execute(insert(audit).values(**row, mac=_mac(secret, before, row)))


async def head(connection: AsyncConnection) -> Head:
    last = await connection.execute(select(audit.c.number, audit.c.mac).order_by(audit.c.number.desc()).limit(1))
    found = last.first()
    return Head(0, _BEGINNING.hex()) if found is None else Head(found.number, bytes(found.mac).hex())


async def page(
    connection: AsyncConnection,
    *,
    tenant: str | None = None,
    action: str | None = None,
    object: str | None = None,
    before: int | None = None,
    limit: int = 20,
) -> list[dict[str, Any]]:
    """The newest rows, those before number `before` if that is given."""
    query = select(audit).order_by(audit.c.number.desc()).limit(limit)
    if before is not None:
        query = query.where(audit.c.number < before)
    for column, value in ((audit.c.tenant, tenant), (audit.c.action, action), (audit.c.object, object)):
        if value is not None:
            query = query.where(column == value)
    return [dict(row) for row in (await connection.execute(query)).mappings()]


async def verify(connection: AsyncConnection, secret: bytes, *, kept: Head | None = None) -> Verdict:
    """From the first row to the last. `kept`: a head that was exported before."""
    mac, number = _BEGINNING, 0
    while True:
        page = await connection.execute(
            select(audit).where(audit.c.number > number).order_by(audit.c.number).limit(_PAGE)
        )
        rows = page.mappings().all()
        for row in rows:
            here = Head(number, mac.hex())
            if row["number"] != number + 1:
                return Verdict(here, f"row {number + 1} is missing")
            expected = _mac(secret, mac, {name: row[name] for name in row if name != "mac"})
            if not hmac.compare_digest(expected, bytes(row["mac"])):
                return Verdict(here, f"row {row['number']} is not as it was written")
            mac, number = expected, row["number"]
            if kept is not None and kept.number == number and kept.mac != mac.hex():
                return Verdict(here, f"row {number} is not the one whose head was kept")
        if not rows:
            break
    end = Head(number, mac.hex())
    if kept is not None and kept.number > number:
        return Verdict(end, f"rows {number + 1} to {kept.number} are missing: the head kept is past the end")
    return Verdict(end, "")


def _mac(secret: bytes, before: bytes, row: Mapping[str, Any]) -> bytes:
    text = json.dumps(row, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
    return hmac.digest(secret, bytes(before) + text.encode(), hashlib.sha256)


def _as_stored(row: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON columns give back is what is signed: a Decimal, e.g., comes back as text."""
    before_and_after = {name: json.loads(json.dumps(row[name], default=str)) for name in ("before", "after")}
    return {**row, **before_and_after}
