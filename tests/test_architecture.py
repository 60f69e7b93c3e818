"""The shape of the code, as far as a machine can hold it: import directions, the environment, plugins, the README."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import typer
from importlinter.cli import lint_imports

from router.cli import app

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("router", "policies", "adapters")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ENTRY_POINTS = [
    (group, name, value)
    for group, entries in {**PYPROJECT["project"]["entry-points"], "scripts": PYPROJECT["project"]["scripts"]}.items()
    for name, value in entries.items()
]


def _sources() -> list[Path]:
    return sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))


def test_the_import_contracts_hold(capsys: pytest.CaptureFixture[str]) -> None:
    broken = lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True, no_logo=True)
    assert broken == 0, capsys.readouterr().out


@pytest.mark.parametrize(("group", "name", "value"), ENTRY_POINTS)
def test_every_entry_point_loads(group: str, name: str, value: str) -> None:
    module, _, attribute = value.partition(":")
    assert callable(getattr(import_module(module), attribute))


def _environment_reads(source: str) -> Iterator[int]:
    """Lines that touch os.environ or os.getenv, however the name was imported."""
    for node in ast.walk(ast.parse(source)):
        name = node.attr if isinstance(node, ast.Attribute) else node.name if isinstance(node, ast.alias) else ""
        if name in ("environ", "environb", "getenv", "getenvb"):
            yield node.lineno


@pytest.mark.parametrize(
    "source",
    ["import os\nos.environ['A']", "import os\nos.getenv('A')", "from os import x\nfrom os import environ as e"],
)
def test_reading_the_environment_is_recognised(source: str) -> None:
    assert list(_environment_reads(source)) == [2]


def test_only_the_configuration_reads_the_environment() -> None:
    readers = {str(file.relative_to(ROOT)) for file in _sources() if any(_environment_reads(file.read_text()))}
    assert readers == {"router/config.py"}


def test_no_package_is_named_after_nothing() -> None:
    """A module says what it knows; these names say nothing."""
    vague = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
    assert [str(file) for file in _sources() if file.stem in vague or file.parent.name in vague] == []


class TestReadme:
    """What the README tells people to type exists."""

    @pytest.fixture
    def readme(self) -> str:
        return (ROOT / "README.md").read_text()

    def test_commands(self, readme: str) -> None:
        known = set(typer.main.get_group(app).commands)
        named = set(re.findall(r"^\s*(?:\$ )?(?:\.venv/bin/)?warmroute ([a-z][\w-]*)", readme, re.MULTILINE))
        assert named
        assert named <= known

    def test_make_targets(self, readme: str) -> None:
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        named = set(re.findall(r"^\s*(?:\$ )?make ([a-z][a-z-]*)", readme, re.MULTILINE))
        assert "test" in named
        assert named <= targets

    def test_files(self, readme: str) -> None:
        linked = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", readme)
        assert [path for path in linked if not (ROOT / path).exists()] == []
