"""What was used and what it cost, summed from the roll-ups: never from single requests, never from memory."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import msgspec
from sqlalchemy import BigInteger, ColumnElement, Row, Table, func, select, text, type_coerce
from sqlalchemy.ext.asyncio import AsyncConnection

from router.errors import BadRequest
from router.store.bands import BAND_NAMES
from router.store.database import Database
from router.store.money import PARTS
from router.store.report_lines import Line, Report, in_order
from router.store.schema import TOKEN_CLASSES, daily, daily_tags, hourly, instance_hours, keys, projects, tenants

DIMENSIONS = ("tenant", "project", "key", "model", "instance", "tag", "day", "hour", "band")
FILTERS = ("tenant", "project", "key", "model", "instance", "tag")
MOST_LINES = 10_000
MOST_HOURLY_DAYS = 7
PERIOD_DAYS = 30

_EPOCH = datetime.date(1970, 1, 1)
_DAY_HOURS = 24
_COUNTS = ("requests", "failed", "aborted", "cached_unknown", "best_hit_tokens", "predicted_hit_tokens",
           "blind_hit_tokens")  # fmt: skip
_TOKENS = tuple(f"{name}_tokens" for name in TOKEN_CLASSES)
_MONEY = ("cost", "output_cost", "cost_without_cache", "cost_cache_blind", "own_cost")
_SPLIT = 10**6
_TO_SORT_IN = "64MB"  # of PostgreSQL's memory: with the 4 it has by default a month by key takes twice as long
_OF_TAGS = frozenset(("tag", "day", "tenant"))


class Question(msgspec.Struct, frozen=True):
    """by: DIMENSIONS. first, last: days UTC, both included. filters: of FILTERS, any of the values.

    own_costs: False keeps from whom it is for what the instances cost.
    """

    by: tuple[str, ...]
    first: datetime.date
    last: datetime.date
    filters: Mapping[str, Sequence[str]] = msgspec.field(default_factory=dict)
    own_costs: bool = True


def asked(
    by: str,
    first: datetime.date | None,
    last: datetime.date | None,
    filters: Mapping[str, Sequence[str]],
    *,
    today: datetime.date,
) -> Question:
    """by: separated by commas. Without a period it is the last 30 days, or the 30 before `last`."""
    last = last or today
    names = tuple(name.strip() for name in by.split(",") if name.strip())
    return Question(names, first or period_to(last), last, filters)


def period_to(last: datetime.date) -> datetime.date:
    """The first of the 30 days up to there; none is before 1970."""
    return _EPOCH + datetime.timedelta(days=max(0, (last - _EPOCH).days + 1 - PERIOD_DAYS))


def month_of(text: str) -> datetime.date:
    """The first day of a month written as 2026-11. Raises BadRequest."""
    try:
        found = datetime.date.fromisoformat(f"{text}-01")
    except ValueError:
        found = datetime.date.max
    if found.year == datetime.date.max.year:  # its end would be none
        raise BadRequest(f"A month is written as 2026-11, not as {text!r}.", param="month")
    return found


async def cost_report(database: Database, question: Question) -> Report:
    """One line for each combination that was used, and currency. Raises BadRequest, StoreUnavailable."""
    _check(question)
    table = _table(question)
    async with database.read() as connection:
        if not database.is_sqlite:
            await connection.execute(text(f"SET LOCAL work_mem = '{_TO_SORT_IN}'"))
        found = (await connection.execute(_query(table, question))).all()
        if len(found) > MOST_LINES:
            raise BadRequest(f"The report has more than {MOST_LINES:,} lines: filter, or group by less.", param="by")
        names = await _names(connection, question.by, found)
        own_currency = await _own_currency(connection, question) if question.own_costs else None
    lines = [_line(question.by, row, names, own_currency) for row in found]
    return Report(question.first, question.last, question.by, question.filters, own_currency, in_order(lines))


async def over_time(database: Database, question: Question) -> Report:
    """The same by day, and by the first of its dimensions as far as that makes no more than MOST_LINES."""
    first = [name for name in question.by if name not in ("day", "hour")][:1]
    try:
        return await cost_report(database, msgspec.structs.replace(question, by=("day", *first)))
    except BadRequest:
        return await cost_report(database, msgspec.structs.replace(question, by=("day",)))


async def statement(database: Database, tenant: str, month: datetime.date, *, own_costs: bool = True) -> Report:
    """What a tenant used in the month of that day, by project and model."""
    first = month.replace(day=1)
    last = (first + datetime.timedelta(days=31)).replace(day=1) - datetime.timedelta(days=1)
    return await cost_report(database, Question(("project", "model"), first, last, {"tenant": [tenant]}, own_costs))


def _check(question: Question) -> None:
    unknown = [name for name in question.by if name not in DIMENSIONS]
    if unknown:
        raise BadRequest(f"There is no report by {unknown[0]!r}: by {', '.join(DIMENSIONS)}.", param="by")
    if len(set(question.by)) < len(question.by):
        raise BadRequest("Something is named twice.", param="by")
    if question.first > question.last:
        raise BadRequest("The period ends before it begins.", param="from")
    if "hour" in question.by and (question.last - question.first).days >= MOST_HOURLY_DAYS:
        raise BadRequest(f"By hour, a report is of {MOST_HOURLY_DAYS} days at most.", param="from")
    used = {*question.by, *question.filters}
    if "tag" in used and not used <= _OF_TAGS:
        others = ", ".join(sorted(used - _OF_TAGS))
        raise BadRequest(f"Tags are summed by day and tenant only, not by {others}.", param="by")


def _table(question: Question) -> Table:
    if "hour" in question.by:
        return hourly
    return daily_tags if "tag" in question.by or "tag" in question.filters else daily


# ---------------------------------------------------------------------------------------------------------------------
# The query


def _query(table: Table, question: Question) -> Any:
    grouped = [_grouped(table, name).label(f"by_{number}") for number, name in enumerate(question.by)]
    grouped.append(table.c.currency.label("in_currency"))
    query = select(*grouped, *_sums(table)).where(_period(table, question))
    for name, values in question.filters.items():
        query = query.where(table.c[name].in_(values))
    return query.group_by(*(column.name for column in grouped)).limit(MOST_LINES + 1)


def _grouped(table: Table, name: str) -> ColumnElement[Any]:
    return table.c.hour // _DAY_HOURS if table is hourly and name == "day" else table.c[name]


def _sums(table: Table) -> Iterable[ColumnElement[Any]]:
    for name in _COUNTS + _TOKENS:
        yield func.sum(table.c[name]).label(name)
    for name in _MONEY:  # in two parts: SQLite's sums end at 64 bits
        parts = type_coerce(table.c[name], BigInteger)
        yield func.sum(parts // _SPLIT).label(f"{name}_whole")
        yield func.sum(parts % _SPLIT).label(f"{name}_rest")


def _period(table: Table, question: Question) -> ColumnElement[bool]:
    return table.c.hour.between(*_hours(question)) if table is hourly else table.c.day.between(*_days(question))


def _days(question: Question) -> tuple[int, int]:
    return (question.first - _EPOCH).days, (question.last - _EPOCH).days


def _hours(question: Question) -> tuple[int, int]:
    first, last = _days(question)
    return first * _DAY_HOURS, (last + 1) * _DAY_HOURS - 1


async def _names(
    connection: AsyncConnection, by: Sequence[str], found: Sequence[Row[Any]]
) -> dict[str, dict[str, str]]:
    """dimension -> id -> name; ids without a row (one open gateway's tenant) have none."""
    names = {}
    for number, name in enumerate(by):
        if name in _NAMED:
            table = _NAMED[name]
            ids = {row[number] for row in found}
            rows = await connection.execute(select(table.c.id, table.c.name).where(table.c.id.in_(ids)))
            names[name] = {id: called for id, called in rows}
    return names


_NAMED = {"tenant": tenants, "project": projects, "key": keys}


async def _own_currency(connection: AsyncConnection, question: Question) -> str | None:
    """None: nobody said what the instances cost, or it was in several currencies, which cannot be added."""
    costly = instance_hours.c.hour.between(*_hours(question)) & (instance_hours.c.cost != 0)
    found = (await connection.scalars(select(instance_hours.c.currency).where(costly).distinct())).all()
    return found[0] if len(found) == 1 else None


# ---------------------------------------------------------------------------------------------------------------------
# The lines


def _line(by: Sequence[str], row: Row[Any], names: Mapping[str, Mapping[str, str]], own_currency: str | None) -> Line:
    found = row._mapping
    where = {name: row[number] for number, name in enumerate(by)}
    sums: dict[str, Any] = {name: int(found[name]) for name in _COUNTS}
    for name in _MONEY:
        sums[name] = Decimal(found[f"{name}_whole"] * _SPLIT + found[f"{name}_rest"]) / PARTS
    if own_currency is None:
        sums["own_cost"] = None
    return Line(
        where={name: _shown(name, value) for name, value in where.items()},
        names={name: names[name].get(value, "") for name, value in where.items() if name in names},
        currency=found["in_currency"],
        tokens={name: int(found[f"{name}_tokens"]) for name in TOKEN_CLASSES},
        has_margin=own_currency == found["in_currency"],
        **sums,
    )


def _shown(dimension: str, value: Any) -> str:
    if dimension == "day":
        return (_EPOCH + datetime.timedelta(days=value)).isoformat()
    if dimension == "hour":
        return f"{datetime.datetime.fromtimestamp(value * 3600, datetime.UTC):%Y-%m-%dT%H:00Z}"
    return BAND_NAMES[value] if dimension == "band" else str(value)
