"""`warmroute reprice` and `warmroute erase`: what may be changed of what requests have cost. The audit log has it."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, TypeVar

import typer

from router import state
from router.cli.options import ConfigFile, read_config
from router.config import Config
from router.serving.ledger import reprice as pricing
from router.store.database import Database
from router.store.edits import edit
from router.store.ledger import erase_end_user, tenants_of_rows
from router.store.pseudonyms import pseudonym

_FORMATS = ["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"]
_EPOCH = datetime.date(1970, 1, 1)

Answer = TypeVar("Answer")


def reprice(
    since: Annotated[datetime.datetime, typer.Option("--from", formats=_FORMATS, help="The first moment, UTC.")],
    until: Annotated[
        datetime.datetime | None, typer.Option("--to", formats=_FORMATS, help="The end, UTC. [default: now]")
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Compute costs anew, by the prices that hold now for the time of each request, and the sums with them."""
    begins = since.replace(tzinfo=datetime.UTC).timestamp()
    ends = (until.replace(tzinfo=datetime.UTC) if until else datetime.datetime.now(datetime.UTC)).timestamp()
    found = read_config(config, None)

    async def run(database: Database) -> bool:
        whole, changed = True, 0
        days = pricing.reprice(database, since=begins, until=ends, unknown_cached=found.ledger.unknown_cached)
        async for day in days:
            name = _EPOCH + datetime.timedelta(days=day.day)
            gone = "; its sums stay: some of its rows are no longer there" if day.gone else ""
            print(f"{name}: {day.changed} of {day.rows} requests have another cost{gone}")
            whole, changed = whole and not day.gone, changed + day.changed
        period = {"since": begins, "until": ends}
        await _note(found, database, "ledger.reprice", f"{since:%Y-%m-%d}", {**period, "requests": changed})
        return whole

    if not _run(found, run):
        raise typer.Exit(1)


def erase(
    end_user: Annotated[str, typer.Option(metavar="ID", help="As the client named them, e.g. in the field `user`.")],
    tenant: Annotated[str | None, typer.Option(help="Its id, if only one knows them. [default: all tenants]")] = None,
    config: ConfigFile = None,
) -> None:
    """Forget an end user: rows keep their figures and lose the pseudonym. Nothing can bring it back."""
    found = read_config(config, None)
    pepper = state.pepper(found, found.make_state_dir())

    async def run(database: Database) -> int:
        async with database.write() as connection:
            tenants = [tenant] if tenant is not None else await tenants_of_rows(connection)
            erased = await erase_end_user(connection, [pseudonym(pepper, one, end_user) for one in tenants])
        await _note(found, database, "ledger.erase", tenant or "all tenants", {"requests": erased}, tenant=tenant)
        return erased

    print(f"{_run(found, run)} requests have no end user any more")


async def _note(
    config: Config, database: Database, action: str, about: str, after: Mapping[str, Any], *, tenant: str | None = None
) -> None:
    secret = state.audit_secret(config, config.make_state_dir())
    async with edit(database, actor="cli", secret=secret) as noted:
        await noted.note(action, about, tenant=tenant, after=after)


def _run(config: Config, work: Callable[[Database], Awaitable[Answer]]) -> Answer:
    async def whole() -> Answer:
        database = await state.open_store(config, config.make_state_dir())
        try:
            return await work(database)
        finally:
            await database.aclose()

    return asyncio.run(whole())
