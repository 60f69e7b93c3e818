"""The audit log: what it holds, and that changing it shows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import delete, update

from router.store import audit as log
from router.store.schema import audit
from tests.router.admin.office import AUDIT, Office, opened


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    async with opened(tmp_path) as office:
        for name in ("a", "b", "c"):
            await office.make("/tenants", name=name)
        yield office


async def test_who_changed_what_is_there(office: Office) -> None:
    _, _, key = await office.tenant("acme")
    await office.call("PATCH", f"/keys/{key['id']}", json={"name": "new"})
    await office.call("PATCH", f"/keys/{key['id']}", json={"name": "new"})  # changes nothing, and is no row
    newest, made = (await office.call("GET", "/audit?limit=2")).json()["data"]
    assert (newest["action"], newest["actor"], newest["about"]) == ("key.update", "bootstrap", key["id"])
    assert (newest["before"], newest["after"]) == ({"name": "one"}, {"name": "new"})
    assert (made["action"], made["tenant"]) == ("key.create", key["tenant"])
    assert "mac" not in made["after"]
    assert key["key"] not in str(made)
    page = (await office.call("GET", f"/audit?after={made['id']}&action=tenant.create&limit=2")).json()
    assert [row["after"]["name"] for row in page["data"]] == ["acme", "c"]


async def test_a_log_that_nobody_touched_is_whole(office: Office) -> None:
    assert (await office.call("POST", "/audit/verify")).json()["whole"] is True
    async with office.database.read() as connection:
        assert (await log.verify(connection, b"another secret")).broken == "row 1 is not as it was written"


@pytest.mark.parametrize(
    ("tampering", "broken"),
    [
        (update(audit).where(audit.c.number == 2).values(actor="nobody"), "row 2 is not as it was written"),
        (update(audit).where(audit.c.number == 2).values(after={"name": "x"}), "row 2 is not as it was written"),
        (update(audit).where(audit.c.number == 2).values(mac=bytes(32)), "row 2 is not as it was written"),
        (delete(audit).where(audit.c.number == 2), "row 2 is missing"),
        (delete(audit).where(audit.c.number == 1), "row 1 is missing"),
    ],
)
async def test_tampering_shows(office: Office, tampering: object, broken: str) -> None:
    async with office.database.write() as connection:
        await connection.execute(tampering)  # type: ignore[call-overload]
    answer = (await office.call("POST", "/audit/verify")).json()
    assert (answer["whole"], answer["broken"]) == (False, broken)


async def test_a_cut_off_end_shows_against_a_head_that_was_kept(office: Office) -> None:
    kept = (await office.call("GET", "/audit/head")).json()
    assert kept["number"] == 3
    async with office.database.write() as connection:
        await connection.execute(delete(audit).where(audit.c.number == 3))
    assert (await office.call("POST", "/audit/verify")).json()["whole"] is True
    answer = (await office.call("POST", "/audit/verify", json=kept)).json()
    assert answer["broken"] == "rows 3 to 3 are missing: the head kept is past the end"
    await office.make("/tenants", name="instead")
    answer = (await office.call("POST", "/audit/verify", json=kept)).json()
    assert answer["broken"] == "row 3 is not the one whose head was kept"


async def test_the_chain_begins_at_zero(office: Office) -> None:
    async with office.database.write() as connection:
        await connection.execute(delete(audit))
        assert await log.head(connection) == (0, "00" * 32)
        assert (await log.verify(connection, AUDIT)).broken == ""
