"""`warmroute trace export`: the load a gateway has served, as a file for `replay` that holds nobody's text."""

from __future__ import annotations

import gzip
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import httpx
import msgspec
import typer

from router.cli.explain import DEFAULT_URL
from router.core import Keys
from router.errors import ConfigError, EngineError

TIMEOUT_S = 60.0
DEFAULT_BLOCK_TOKENS = 64
"""Where no prompt at all was known: then no two requests share a block of whatever size."""
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}

trace = typer.Typer(help="The load that a running gateway has served.", no_args_is_help=True, rich_markup_mode=None)


class _Row(msgspec.Struct):
    """What is needed of a line of `/admin/v1/trace`."""

    timestamp: float
    input_length: int
    output_length: int
    stream: bool
    turn: int
    hash_ids: Keys
    block_size: int | None = None
    session: int | None = None
    tenant: int | None = None


@trace.callback()
def _group() -> None:
    """So that `export` stays a word of its own: a group of one command would be that command."""


@trace.command()
def export(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="JSON lines; gzipped if the name ends in .gz.")
    ],
    admin: Annotated[str, typer.Option(metavar="URL", help="The gateway's admin address.")] = DEFAULT_URL,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="What arrived since: 30m, 2h, 1d ago, or 2026-01-31T12:00.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Requests for this public model only.")] = None,
) -> None:
    """Write the requests served lately as a trace.

    The form is Mooncake's: arrivals in ms from the first, lengths in tokens, a number for each block of a prompt, and
    with it block_size, session, turn, tenant, stream. Numbers count up as they first appear, so nothing of a prompt, a
    key, a name or the time of day is in the file. The gateway keeps the last requests in bounded memory.
    """
    wanted = {"since": str(_seconds_since_1970(since)) if since else None, "model": model}
    rows = _fetch(admin.rstrip("/"), {name: value for name, value in wanted.items() if value is not None})
    if not rows:
        raise EngineError(f"the gateway at {admin} has kept no such request")
    block_size, left_out = _common_block_size(rows)
    kept = sorted((row for row in rows if row.block_size in (None, block_size)), key=lambda row: row.timestamp)
    try:
        _write(output, trace_lines(kept, block_size))
    except OSError as error:
        raise ConfigError([f"{output}: {error.strerror}"]) from None
    print(_summary(kept, block_size, output))
    for size, count in left_out.items():
        print(f"left out, since a trace has one block size: {count:,} in blocks of {size}; --model exports one model")


def trace_lines(rows: Sequence[_Row], block_size: int) -> Iterator[bytes]:
    """A line a request. `rows` in order of arrival; blocks that were not known get numbers of their own."""
    blocks, sessions, tenants = _Numbers(), _Numbers(), _Numbers()
    start = rows[0].timestamp
    for row in rows:
        full = row.input_length // block_size
        ids = [blocks.of(name) for name in row.hash_ids[:full]]
        ids += [blocks.new() for _ in range(-(-row.input_length // block_size) - len(ids))]
        line: dict[str, Any] = {
            "timestamp": round(row.timestamp - start),
            "input_length": row.input_length,
            "output_length": row.output_length,
            "hash_ids": ids,
            "block_size": block_size,
            "turn": row.turn,
            "stream": row.stream,
        }
        if row.session is not None:
            line["session"] = sessions.of(row.session)
        if row.tenant is not None:
            line["tenant"] = tenants.of(row.tenant)
        yield msgspec.json.encode(line) + b"\n"


class _Numbers:
    """Small numbers for names, in the order in which they first appear."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._next = 0

    def of(self, name: int) -> int:
        number = self._known.get(name)
        if number is None:
            number = self._known[name] = self.new()
        return number

    def new(self) -> int:
        """One that nothing else has."""
        self._next += 1
        return self._next - 1


def _common_block_size(rows: Iterable[_Row]) -> tuple[int, dict[int, int]]:
    """A trace has one: that of most requests. And how many have another, by size."""
    sizes = Counter(row.block_size for row in rows if row.block_size is not None)
    if not sizes:
        return DEFAULT_BLOCK_TOKENS, {}
    (size, _), *others = sizes.most_common()
    return size, dict(others)


def _summary(rows: Sequence[_Row], block_size: int, output: Path) -> str:
    seconds = (rows[-1].timestamp - rows[0].timestamp) / 1e3
    tokens = sum(row.input_length for row in rows)
    blocks = sum(row.input_length // block_size for row in rows)
    known = sum(len(row.hash_ids) for row in rows)
    summary = f"{output}: {len(rows):,} requests in {seconds:,.0f} s, {tokens:,} prompt tokens, blocks of {block_size}"
    if known < blocks:
        summary += f"; {blocks - known:,} of {blocks:,} blocks were not known, and count as shared with nobody"
    return summary


# --- what is asked


def _fetch(url: str, query: dict[str, str]) -> list[_Row]:
    decode = msgspec.json.Decoder(_Row, dec_hook=_packed).decode
    try:
        with httpx.stream("GET", f"{url}/admin/v1/trace", params=query, timeout=TIMEOUT_S) as response:
            if response.is_error:
                response.read()
                raise EngineError(f"the gateway at {url} answered HTTP {response.status_code}", detail=response.text)
            return [decode(line) for line in response.iter_lines() if line]
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EngineError(f"no gateway answers at {url} (is `warmroute serve` running?)", detail=str(error)) from error
    except msgspec.MsgspecError as error:
        raise EngineError(f"{url} is not a warmroute admin API", detail=str(error)) from error


def _packed(kind: type, value: Any) -> Keys:
    """Eight bytes a block instead of an object."""
    try:
        return array("Q", value)
    except OverflowError:
        raise ValueError("an id of more than 64 bits") from None


def _seconds_since_1970(text: str) -> float:
    number, unit = text[:-1], text[-1:]
    try:
        if unit in _UNITS:
            return (datetime.now() - timedelta(**{_UNITS[unit]: float(number)})).timestamp()
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        mistake = f"--since {text}: it has to be like 30m, 2h or 1d, or a date and time like 2026-01-31T12:00"
        raise ConfigError([mistake]) from None


def _write(output: Path, lines: Iterable[bytes]) -> None:
    with gzip.GzipFile(output, "wb", mtime=0) if output.suffix == ".gz" else output.open("wb") as file:
        file.writelines(lines)
