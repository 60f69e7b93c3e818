"""The walk through two tenants: its configuration, and that all it calls is there, command by command."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from router import config
from router.admin.account_relay import ROUTES
from router.admin.api import create_app
from router.admin.desk import Desk
from router.cli import app
from router.config import Config
from router.store.database import open_database
from tests.router.admin.test_api import FakeLive

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tenants"
CODE = "".join(re.findall(r"```bash\n(.*?)```", (EXAMPLE / "README.md").read_text(), re.DOTALL))


@pytest.fixture
def schema(sqlite_url: str) -> Any:
    return create_app(FakeLive(), Desk(open_database(sqlite_url), audit_secret=b"", pepper=b"")).openapi()


def test_its_configuration_is_right() -> None:
    found: Config = config.load(EXAMPLE / "warmroute.yaml", environ={"BOOTSTRAP_KEY": "b" * 64})
    assert found.auth.mode == "keys"
    for engine in found.engines:
        assert f"--port {engine.url.rpartition(':')[2]} --model demo" in CODE


def test_its_commands_are_ours() -> None:
    lines = re.findall(r"warmroute ((?:sim-engine|serve|[a-z]+ [a-z]+|report)\b[^|>&;)\n]*)", CODE)
    assert len(lines) >= 10
    for line in lines:
        command: Any = typer.main.get_command(app)
        words = shlex.split(line)
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        command.make_context("warmroute", words)  # raises for an option or argument that it does not have


def test_its_calls_are_routes_and_their_bodies_fit(schema: Any) -> None:
    calls = re.findall(r"admin (?:-X (\w+) )?localhost:4001(/\S+)(?: \\\n  -d '(.*)')?", CODE)
    assert len(calls) >= 4
    for method, path, body in calls:
        route = re.sub(r"/\$\w+$", "/{tenant_id}", path).replace("isolation/acme", "isolation/{tenant}")
        said = schema["paths"][route][(method or ("post" if body else "get")).lower()]
        if body:
            wanted = said["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            fields = json.loads(re.sub(r"'\$\w+'", "ten_x", body)).keys()
            model = schema["components"]["schemas"][wanted]
            assert set(model["required"]) <= fields <= model["properties"].keys()
    assert "/v1/usage" in ROUTES
    assert "localhost:4000/v1/usage" in CODE
