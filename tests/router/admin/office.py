"""The admin API over a real database, as its administrators see it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from router.admin.access import Access, Tokens
from router.admin.api import create_app
from router.admin.desk import Desk
from router.store.database import Database, open_database
from router.store.schema import metadata
from tests.router.admin.test_api import FakeLive

BOOTSTRAP = "b" * 32
PEPPER, AUDIT = b"pepper", b"audit"


class Office:
    """`at` is what the clock says. Calls are the bootstrap key's unless told otherwise."""

    def __init__(self, database: Database, *, tokens: Tokens | None = None, bootstrap: str | None = BOOTSTRAP) -> None:
        self.database = database
        self.at = 1_000_000.0
        clock = lambda: self.at  # noqa: E731
        self.desk = Desk(database, audit_secret=AUDIT, pepper=PEPPER, clock=clock)
        access = Access(database, pepper=PEPPER, bootstrap_key=bootstrap, tokens=tokens, clock=clock)
        self.app = create_app(FakeLive(), self.desk, access)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://admin")

    async def call(self, method: str, path: str, *, key: str | None = BOOTSTRAP, **how: Any) -> httpx.Response:
        return await self.ask(method, f"/admin/v1{path}", key=key, **how)

    async def ask(self, method: str, path: str, *, key: str | None = BOOTSTRAP, **how: Any) -> httpx.Response:
        headers = {**how.pop("headers", {}), **({} if key is None else {"authorization": f"Bearer {key}"})}
        return await self.client.request(method, path, headers=headers, **how)

    async def make(self, path: str, key: str = BOOTSTRAP, **fields: Any) -> dict[str, Any]:
        self.at += 1
        answer = await self.call("POST", path, key=key, json=fields)
        assert answer.status_code == 201, answer.text
        made: dict[str, Any] = answer.json()
        return made

    async def tenant(self, name: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """With a project and a key."""
        tenant = await self.make("/tenants", name=name)
        project = await self.make("/projects", tenant=tenant["id"], name="search")
        return tenant, project, await self.make("/keys", project=project["id"], name="one")


@asynccontextmanager
async def opened(folder: Path, **how: Any) -> AsyncIterator[Office]:
    database = open_database(f"sqlite:///{folder}/warmroute.db")
    async with database.write() as connection:
        await connection.run_sync(metadata.create_all)
    office = Office(database, **how)
    try:
        yield office
    finally:
        await office.client.aclose()
        await database.aclose()
