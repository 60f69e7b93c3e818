"""`warmroute check`: is the configuration right, before anything starts?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from router.cli.figures import write_json
from router.cli.options import ConfigFile, JsonFile, read_config
from router.config import Config, json_schema
from router.errors import ConfigError


def check(
    config: ConfigFile = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of the file, for editors.")] = False,
    json: JsonFile = None,
) -> None:
    """Check the configuration.

    Prints every mistake with its line and what to do; exit code 1 if there are any. Also loads the policies and
    adapters it names. Connects to nothing: that is `warmroute doctor`.
    """
    if schema:
        write_json(Path("-"), json_schema())
        return
    try:
        found = read_config(config, None)
    except ConfigError as error:
        _report({"ok": False, "mistakes": list(error.mistakes), "notes": []}, list(error.mistakes), json)
        raise typer.Exit(1) from None
    notes = [f"note: {note}" for note in found.notes]
    _report({"ok": True, "mistakes": [], "notes": list(found.notes)}, [_summary(found), *notes], json)


def _report(figures: dict[str, Any], lines: list[str], file: Path | None) -> None:
    if file:
        write_json(file, figures)
    if str(file) != "-":
        for line in lines:
            print(line)


def _summary(found: Config) -> str:
    models = f"models named: {', '.join(found.models)}" if found.models else "models as the engines list them"
    return f"ok: {len(found.engines)} engine(s), {models}, policy {found.policy.name}"
