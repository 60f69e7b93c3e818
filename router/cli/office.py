"""The admin API without its port: what `warmroute tenants`, `keys` … do, they do over the same routes as everybody."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.table import Table
from rich.text import Text

from router import state
from router.admin.access import Access
from router.admin.api import create_app
from router.admin.desk import Desk
from router.cli.figures import terminal, write_json
from router.cli.options import read_config
from router.errors import WarmrouteError

_PAGE = 100


class Office:
    """Opened for one command: `call` and `everything` for the routes, `find` for what people call by its name."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None, **query: Any) -> dict[str, Any]:
        """Raises WarmrouteError with what the API says."""
        given = {name: value for name, value in query.items() if value is not None}
        answer = await self._client.request(method, f"/admin/v1{path}", json=body, params=given)
        said: dict[str, Any] = answer.json()
        if answer.is_error:
            raise WarmrouteError(said["error"]["message"])
        return said

    async def everything(self, path: str, **query: Any) -> list[dict[str, Any]]:
        """All pages of a list."""
        rows: list[dict[str, Any]] = []
        after = None
        while True:
            page = await self.call("GET", path, limit=_PAGE, after=after, **query)
            rows += page["data"]
            if not page["has_more"]:
                return rows
            after = page["last_id"]

    async def find(self, path: str, name: str, **query: Any) -> str:
        """The id of what has this id or name. Raises WarmrouteError where there is none, or several."""
        found = [row["id"] for row in await self.everything(path, **query) if name in (row["id"], row["name"])]
        if len(found) != 1:
            raise WarmrouteError(f"There {'are several' if found else 'is none'} of {path.strip('/')} named {name!r}.")
        return str(found[0])


def run(config: Path | None, work: Any) -> Any:
    """`work(office)` over the database of the configuration, as the administrator "cli"."""

    async def inside() -> Any:
        found = read_config(config, None)
        folder = found.make_state_dir()
        database = await state.open_store(found, folder)
        desk = Desk(database, audit_secret=state.audit_secret(found, folder), pepper=state.pepper(found, folder))
        access = Access.of("cli")
        try:
            transport = httpx.ASGITransport(create_app(None, desk, access))
            async with httpx.AsyncClient(transport=transport, base_url="http://warmroute") as client:
                return await work(Office(client))
        finally:
            await database.aclose()

    return asyncio.run(inside())


def show(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], *, json: Path | None = None) -> None:
    """As a table, or as JSON."""
    if json is not None:
        write_json(json, list(rows))
    if str(json) == "-":
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(Text(_plain(row.get(column))) for column in columns))
    terminal().print(table)


def _plain(value: object) -> str:
    if value in (None, [], {}):
        return "-"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
