"""Who has which key, as the database says it and when it does not."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from router.errors import StoreUnavailable, Unauthenticated
from router.serving import callers as serving
from router.serving.callers import Callers
from router.store.database import Database, open_database
from router.store.schema import projects, tenants
from tests.accounts import PEPPER, Accounts


@pytest.fixture
def accounts(database: Database) -> Accounts:
    return Accounts(database)


@pytest.fixture
async def file(sqlite_url: str, tmp_path: Path) -> AsyncIterator[Accounts]:
    """In a file that a test may put somewhere else."""
    (tmp_path / "db").mkdir()
    (tmp_path / "warmroute.sqlite").rename(tmp_path / "db" / "w.db")
    database = open_database(f"sqlite:///{tmp_path / 'db' / 'w.db'}")
    yield Accounts(database)
    await database.aclose()


class Clocks:
    """What the callers take for now; moved by hand."""

    def __init__(self) -> None:
        self.monotonic = 1_000.0
        self.wall = time.time()

    def pass_(self, seconds: float) -> None:
        self.monotonic += seconds
        self.wall += seconds


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def callers(accounts: Accounts, clocks: Clocks) -> Callers:
    return made(accounts.database, clocks)


def made(database: Any, clocks: Clocks) -> Callers:
    return Callers(
        database,
        pepper=PEPPER.encode(),
        salt_of=lambda domain: f"salt of {domain}",
        refresh_s=0.5,
        stale_s=900.0,
        clock=lambda: clocks.monotonic,
        wall_clock=lambda: clocks.wall,
    )


def is_known(callers: Callers, key: str) -> bool:
    try:
        callers.find(key)
    except Unauthenticated:
        return False
    return True


# --- what is known of a key


async def test_a_key_tells_tenant_project_and_what_they_may(accounts: Accounts, callers: Callers) -> None:
    labels = {"pool": "gold"}
    tenant = await accounts.tenant("acme", priority=3, steers=True, instance_labels=labels)
    project = await accounts.project(tenant)
    key = await accounts.key(project, models=["a", "b"])
    await callers.refresh()
    caller = callers.find(key)
    assert (caller.tenant, caller.project, caller.key) == (tenant, project, accounts.id_of(key))
    assert (caller.priority, caller.steers, caller.labels) == (3, True, labels)
    assert caller.models == {"a", "b"}
    assert callers.find(key) is caller  # made once


@pytest.mark.parametrize("isolation", ["tenant", "key", "group:ours", "shared"])
async def test_domains(accounts: Accounts, callers: Callers, isolation: str) -> None:
    keys = []
    for name in ("one", "two"):
        tenant = await accounts.tenant(name, isolation=isolation)
        project = await accounts.project(tenant)
        keys.append((tenant, [await accounts.key(project), await accounts.key(project)]))
    await callers.refresh()
    for tenant, (first, second) in keys:
        expected = {
            "tenant": [f"tenant:{tenant}"] * 2,
            "key": [f"key:{accounts.id_of(first)}", f"key:{accounts.id_of(second)}"],
        }.get(isolation, [isolation] * 2)
        found = [callers.find(key) for key in (first, second)]
        assert [caller.domain for caller in found] == expected
        assert [caller.salt for caller in found] == [f"salt of {domain}" for domain in expected]


async def test_another_isolation_of_a_tenant_changes_all_its_keys(accounts: Accounts, callers: Callers) -> None:
    key = await accounts.new()
    await callers.refresh()
    await accounts.change(tenants, callers.find(key).tenant, isolation="shared", priority=7)
    await callers.refresh()
    assert (callers.find(key).domain, callers.find(key).salt) == ("shared", "salt of shared")
    assert callers.find(key).priority == 7


async def test_unknown_keys_and_keys_of_administrators(accounts: Accounts, callers: Callers) -> None:
    await accounts.new()
    admin = await accounts.key(None, kind="admin")
    await callers.refresh()
    for key in ("sk-nobody", "", admin):
        with pytest.raises(Unauthenticated, match="Incorrect"):
            callers.find(key)


async def test_another_pepper_is_another_key(accounts: Accounts, clocks: Clocks) -> None:
    key = await accounts.new()
    other = Callers(
        accounts.database, pepper=b"q" * 32, salt_of=lambda domain: None, refresh_s=0.5, stale_s=900.0,
        clock=lambda: clocks.monotonic,
    )  # fmt: skip
    await other.refresh()
    assert not is_known(other, key)


async def test_a_tenant_by_id_and_by_name(accounts: Accounts, callers: Callers) -> None:
    tenant = await accounts.tenant("acme", isolation="key")
    await callers.refresh()
    caller = callers.tenant("acme")
    assert caller is not None
    assert callers.tenant(tenant) is caller
    assert (caller.tenant, caller.project, caller.key) == (tenant, "", "")
    assert caller.domain == f"key:{tenant}"  # one key, as far as isolation goes
    await accounts.change(tenants, tenant, name="acme & sons")
    await callers.refresh()
    assert callers.tenant("acme") is None
    assert callers.tenant("acme & sons") is not None
    await accounts.change(tenants, tenant, archived_at=time.time())
    await callers.refresh()
    assert callers.tenant(tenant) is callers.tenant("acme & sons") is None


# --- how a key ends


@pytest.mark.parametrize("end", ["expires_at", "revoked_at"])
async def test_a_time_that_lies_ahead_ends_a_key_when_it_comes(
    accounts: Accounts, callers: Callers, clocks: Clocks, end: str
) -> None:
    """A key that was replaced works until its grace is over, without anything being read meanwhile."""
    key = await accounts.new(**{end: clocks.wall + 60})
    await callers.refresh()
    clocks.pass_(59)
    assert is_known(callers, key)
    clocks.pass_(2)
    assert not is_known(callers, key)


@pytest.mark.parametrize("what", ["key", "project", "tenant"])
async def test_the_end_of_a_key_its_project_or_its_tenant(accounts: Accounts, callers: Callers, what: str) -> None:
    key, other = await accounts.new(), await accounts.new("other")
    await callers.refresh()
    caller = callers.find(key)
    if what == "key":
        await accounts.revoke(key)
    elif what == "project":
        await accounts.change(projects, caller.project, archived_at=time.time())
    else:
        await accounts.change(tenants, caller.tenant, archived_at=time.time())
    await callers.refresh()
    assert not is_known(callers, key)
    assert is_known(callers, other)
    assert callers.state()["keys"] == 1  # it takes no room any more


async def test_what_has_ended_before_the_start_is_not_even_read(accounts: Accounts, callers: Callers) -> None:
    ended = [await accounts.new("one"), await accounts.new("two"), await accounts.new("three", expires_at=1.0)]
    await accounts.revoke(ended[0])
    async with accounts.database.read() as connection:
        row = (await connection.execute(tenants.select().where(tenants.c.name == "two"))).one()
    await accounts.change(tenants, row.id, archived_at=1.0)
    await callers.refresh()
    assert callers.state()["keys"] == 0
    assert not any(is_known(callers, key) for key in ended)


async def test_a_tenant_that_comes_back(accounts: Accounts, callers: Callers) -> None:
    key = await accounts.new()
    await callers.refresh()
    tenant = callers.find(key).tenant
    for archived_at, known in ((time.time(), False), (None, True)):
        await accounts.change(tenants, tenant, archived_at=archived_at)
        await callers.refresh()
        assert is_known(callers, key) is known


async def test_a_refresh_reads_only_what_is_newer(
    accounts: Accounts, callers: Callers, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [await accounts.new(name) for name in "abc"]
    await callers.refresh()
    before = [callers.find(key) for key in keys]
    read: list[str] = []
    take = serving.Roll.take_key
    monkeypatch.setattr(serving.Roll, "take_key", lambda roll, row, now: (read.append(row.id), take(roll, row, now)))
    await callers.refresh()
    assert read == []
    await accounts.change_key(keys[1], models=["m"])
    await callers.refresh()
    assert read == [accounts.id_of(keys[1])]
    assert [callers.find(key) is caller for key, caller in zip(keys, before, strict=True)] == [True, False, True]


# --- time and order


async def test_a_database_that_has_gone_back_in_time_revives_no_key(
    file: Accounts, clocks: Clocks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A replica that lags, or a copy that was put back: its keys are not believed until it has caught up."""
    revoked, kept = await file.new("one"), await file.new("two")
    await file.database.aclose()
    shutil.copy(tmp_path / "db" / "w.db", tmp_path / "old.db")
    callers = made(file.database, clocks)
    await file.revoke(revoked)
    await callers.refresh()
    old = callers._database = open_database(f"sqlite:///{tmp_path / 'old.db'}")
    await callers.refresh()
    assert callers.state()["database"] == "away"
    assert "older than what was read before" in caplog.text
    with pytest.raises(StoreUnavailable):
        callers.find(revoked)
    assert is_known(callers, kept)
    late = [
        await Accounts(old).new(name) for name in ("written after the copy was put back", "as many revisions again")
    ]
    await callers.refresh()
    assert callers.state()["database"] == "ok"
    assert all(is_known(callers, key) for key in late)
    await old.aclose()


async def test_refreshes_follow_each_other(accounts: Accounts, callers: Callers) -> None:
    key = await accounts.new()
    reads = [asyncio.ensure_future(callers.refresh()) for _ in range(3)]
    await accounts.revoke(key)
    await asyncio.gather(*reads, callers.refresh())
    assert not is_known(callers, key)


async def test_more_keys_than_are_kept(
    accounts: Accounts, callers: Callers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serving, "MOST_KEYS", 2)
    project = await accounts.project(await accounts.tenant("acme"))
    keys = [await accounts.key(project) for _ in range(3)]
    await callers.refresh()
    assert callers.state()["keys"] == 2
    assert "there are more than 2 keys: 1 of them" in caplog.text
    answers = []
    for key in keys:
        try:
            answers.append(callers.find(key).key)
        except StoreUnavailable as error:
            answers.append(str(error.status))
    assert answers.count("503") == 1


# --- a database that is away


async def test_away_and_back(file: Accounts, clocks: Clocks, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "warmroute")
    key = await file.new()
    callers = made(file.database, clocks)
    await callers.refresh()
    assert callers.state()["database"] == "ok"
    await file.database.aclose()
    folder = (tmp_path / "db").rename(tmp_path / "elsewhere")
    for _ in range(3):
        await callers.refresh()
        clocks.pass_(0.5)
    assert callers.state()["database"] == "away"
    assert callers.figures()["store_up"] == 0
    assert is_known(callers, key)
    with pytest.raises(StoreUnavailable) as refused:
        callers.find("sk-new")
    assert (refused.value.status, refused.value.retry_after_s) == (503, 1.0)
    with pytest.raises(StoreUnavailable):
        callers.tenant("new")

    clocks.pass_(901)
    await callers.refresh()
    assert callers.state()["database"] == "stale"
    for asked in (key, "sk-new"):
        with pytest.raises(StoreUnavailable):
            callers.find(asked)

    folder.rename(tmp_path / "db")
    await callers.refresh()
    assert callers.state()["database"] == "ok"
    assert is_known(callers, key)
    assert not is_known(callers, "sk-new")
    said = [record.getMessage() for record in caplog.records if record.name == "warmroute"]
    assert [line.split(" (")[0] for line in said] == [
        "the database is away",
        "the database cannot be read",
        "the database is back",
    ]


async def test_nothing_was_ever_read(clocks: Clocks, tmp_path: Path) -> None:
    database = open_database(f"sqlite:///{tmp_path / 'no tables.db'}")
    callers = made(database, clocks)
    await callers.refresh()
    assert callers.state()["database"] == "unread"
    assert callers.had_tenants is None
    with pytest.raises(StoreUnavailable):
        callers.find("sk-any")
    await database.aclose()


async def test_a_check_that_hangs_is_noticed_by_its_age(accounts: Accounts, callers: Callers, clocks: Clocks) -> None:
    key = await accounts.new()
    await callers.refresh()
    clocks.pass_(4)
    assert callers.state()["database"] == "away"
    assert is_known(callers, key)
    with pytest.raises(StoreUnavailable):
        callers.find("sk-new")
