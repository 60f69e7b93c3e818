from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from router.cli import app
from router.store.database import open_database
from tests.router.store.rows import DAY, DAY_S, row, write


@pytest.fixture
def config(tmp_path: Path, sqlite_url: str) -> str:
    async def fill() -> None:
        database = open_database(sqlite_url)
        rows = [row("1", model="small"), row("2", model="[b]large", at=(DAY - 1) * DAY_S), row("3", model="small")]
        await write(database, rows)
        await database.aclose()

    asyncio.run(fill())
    file = tmp_path / "warmroute.yaml"
    file.write_text(f"engines: [{{url: 'http://127.0.0.1:1'}}]\nstore: {{url: '{sqlite_url}'}}\n")
    return str(file)


def _run(config: str, *arguments: str) -> str:
    result = CliRunner().invoke(
        app, ["report", "-c", config, "--from", "2026-11-29", "--to", "2026-11-30", *arguments], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.output


def test_a_table_with_names_figures_and_totals(config: str) -> None:
    lines = [line.split() for line in _run(config, "--by", "model").splitlines()]
    assert lines[4][:8] == ["small", "USD", "2", "200", "20", "60.0%", "1.00", "0.600"]
    assert lines[5][0] == "[b]large"
    assert lines[-2][1:3] == ["USD", "3"]


def test_filters_and_files(config: str, tmp_path: Path) -> None:
    figures, page = tmp_path / "report.json", tmp_path / "report.html"
    told = _run(config, "--by", "day", "--only", "model=small", "--json", str(figures), "--html", str(page))
    assert "2026-11-30" in told
    assert [(line["day"], line["requests"]) for line in json.loads(figures.read_text())["lines"]] == [("2026-11-30", 2)]
    assert page.read_text().startswith("<!doctype html>")


def test_csv_and_focus_on_standard_output(config: str) -> None:
    assert _run(config, "--by", "day", "--csv", "-").splitlines()[1].startswith("2026-11-29,USD,1,")
    focus = _run(config, "--focus").splitlines()
    assert focus[0].startswith("BilledCost,BillingAccountId,")
    assert len(focus) == 1 + 2 * 2


@pytest.mark.parametrize("arguments", [["--only", "colour=red"], ["--from", "yesterday"]])
def test_what_is_written_wrongly(config: str, arguments: list[str]) -> None:
    assert CliRunner().invoke(app, ["report", "-c", config, *arguments]).exit_code == 2
