from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from router.cli import app
from router.store.migrate import head


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "warmroute.yaml"
    file.write_text(f"engines: [{{url: 'http://127.0.0.1:1'}}]\nstore: {{url: 'sqlite:///{tmp_path}/named.sqlite'}}\n")
    return str(file)


def test_up_and_down_by_hand(config: str) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["db", *arguments, "-c", config])
        return result.exit_code, result.output

    code, told = run("check")
    assert code == 1
    assert "run `warmroute db upgrade" in told
    assert run("upgrade") == (0, f"ok: the database is at revision {head()}\n")
    assert run("check") == (0, "ok\n")
    assert run("current") == (0, f"database: {head()}\nthis version: {head()}\n")
    assert run("downgrade", "base") == (0, "ok: the database is at revision None\n")
