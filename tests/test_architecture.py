"""The shape of the code, as far as a machine can hold it: import directions, the environment, plugins, the README."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import typer

from router import plugins
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


def test_the_import_contracts_hold() -> None:
    """In a process of its own: it configures logging, after which no test in this one would see a line of ours."""
    lint = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"]
    linted = subprocess.run(lint, cwd=ROOT, capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout + linted.stderr


@pytest.mark.parametrize(("group", "name", "value"), ENTRY_POINTS)
def test_every_entry_point_loads(group: str, name: str, value: str) -> None:
    module, _, attribute = value.partition(":")
    assert callable(getattr(import_module(module), attribute))


@pytest.mark.parametrize("group", [plugins.POLICIES, plugins.ADAPTERS, plugins.DISCOVERY])
def test_every_plugin_group_that_the_code_asks_for_is_declared(group: str) -> None:
    assert PYPROJECT["project"]["entry-points"].get(group)


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
    assert readers == {"router/config/__init__.py"}


def test_no_package_is_named_after_nothing() -> None:
    """A module says what it knows; these names say nothing."""
    vague = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
    assert [str(file) for file in _sources() if file.stem in vague or file.parent.name in vague] == []


def _typed(text: str, program: str) -> set[str]:
    """The first words after `program` in the lines of a README that one is told to type."""
    return set(re.findall(rf"^ *(?:\$ )?(?:\.venv/bin/)?{program} +([a-z][\w-]*)", text, re.MULTILINE))


def test_what_one_is_told_to_type_is_recognised() -> None:
    text = "see warmroute x\n    warmroute serve -c a\n    $ .venv/bin/warmroute sim-engine\nmake run\n"
    assert (_typed(text, "warmroute"), _typed(text, "make")) == ({"serve", "sim-engine"}, {"run"})


@pytest.mark.parametrize(
    "readme", sorted([ROOT / "README.md", *(ROOT / "examples").glob("*/README.md")]), ids=lambda file: file.parent.name
)
class TestReadmes:
    """What a README tells people to type exists."""

    def test_commands(self, readme: Path) -> None:
        assert _typed(readme.read_text(), "warmroute") <= set(typer.main.get_group(app).commands)

    def test_make_targets(self, readme: Path) -> None:
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert _typed(readme.read_text(), "make") <= targets

    def test_linked_files(self, readme: Path) -> None:
        linked = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", readme.read_text())
        assert [path for path in linked if not (readme.parent / path).exists()] == []


def test_the_readme_says_how_to_test() -> None:
    assert "test" in _typed((ROOT / "README.md").read_text(), "make")
