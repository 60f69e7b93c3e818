"""`warmroute doctor`: are the engines set up so that routing by cache can work, and if not, what is to be done?"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import httpx
import msgspec
import typer
from rich.table import Table
from rich.text import Text

from router.cli.checkup import Examined, Finding, compare, examine, unreachable
from router.cli.engines import Known, known_engines
from router.cli.figures import terminal, write_json
from router.cli.options import ConfigFile, Engines, JsonFile, TokenizerName, read_config
from router.cli.parity_check import check_parity
from router.cli.python_check import check_python
from router.cli.store_check import check_store
from router.config import Config
from router.errors import EngineTlsError
from router.roster import close_adapters, load_adapters
from router.tls import client_context

AT_ONCE = 16
"""Engines examined at the same time."""

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "dim"}


def doctor(
    config: ConfigFile = None, engine: Engines = None, tokenizer: TokenizerName = None, json: JsonFile = None
) -> None:
    """Examine every engine.

    Events, replay, prefix caching, cached counts, block size, parity, keys, open ports, isolation, and the Python it
    runs on: every finding says what was seen and what mends it. Sends each engine some small requests of one token.
    Exit code 1 if anything fails; warnings don't count. With auth.mode: keys, what lets tenants into each other's
    caches is a failure.
    """
    findings = asyncio.run(examine_all(read_config(config, engine, tokenizer=tokenizer)))
    if json:
        write_json(json, msgspec.to_builtins(findings))
    if str(json) != "-":
        show(findings)
    if any(finding.state == "fail" for finding in findings):
        raise typer.Exit(1)


async def examine_all(config: Config) -> list[Finding]:
    """All engines in the order of the configuration, then what concerns several, the database and Python."""
    adapters = load_adapters()
    gate = asyncio.Semaphore(AT_ONCE)
    try:
        known = await known_engines(config, adapters)
        examined = await asyncio.gather(*(_examine(config, one, gate) for one in known))
    finally:
        await close_adapters(adapters)
    of_engines = [finding for one in examined for finding in one.findings]
    return [*of_engines, *compare(examined), *await check_store(config), check_python()]


async def _examine(config: Config, known: Known, gate: asyncio.Semaphore) -> Examined:
    instance = known.instance
    if known.adapter is None:
        return Examined(instance, None, [unreachable(instance, known.why_not)])
    async with gate:
        try:
            tls = await client_context(instance.tls)
        except EngineTlsError as error:
            return Examined(instance, None, [unreachable(instance, error.message)])
        async with httpx.AsyncClient(trust_env=False, verify=tls) as client:
            examined = await examine(instance, known.adapter, client, isolates=config.auth.mode == "keys")
        if examined.facts:
            examined.findings.append(await check_parity(config, instance, examined.facts, known.adapter))
    return examined


def show(findings: Sequence[Finding]) -> None:
    console = terminal()
    table = Table("engine", "check", "", "what was seen", "what mends it")
    for finding in findings:
        state = Text(finding.state, style=_COLOURS[finding.state])
        table.add_row(Text(finding.engine), finding.check, state, Text(finding.seen), Text(finding.mend))
    console.print(table)
    counts = Counter[str](finding.state for finding in findings)
    console.print(", ".join(f"{counts[state]} {state}" for state in _COLOURS if counts[state]))
