"""`warmroute audit`: is the log of what administrators changed whole?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from router.cli.figures import write_json
from router.cli.office import run
from router.cli.options import ConfigFile
from router.errors import ConfigError

audit = typer.Typer(no_args_is_help=True, help="The log of what administrators changed.")


@audit.command("head")
def head(config: ConfigFile = None) -> None:
    """Print the head of the log as JSON, to be kept elsewhere: what is cut off the end shows only against it."""
    write_json(Path("-"), run(config, lambda o: o.call("GET", "/audit/head")))


@audit.command("verify")
def verify(
    kept: Annotated[Path | None, typer.Option("--head", metavar="FILE", help="A head that was kept.")] = None,
    config: ConfigFile = None,
) -> None:
    """Check that every row is as it was written and none is missing. Exit code 1 if not."""
    found: dict[str, Any] = run(config, lambda o: o.call("POST", "/audit/verify", kept and _read(kept)))
    number = found["head"]["number"]
    if found["whole"]:
        typer.echo(f"whole: {number} rows")
        return
    typer.echo(f"broken after row {number}: {found['broken']}")
    raise typer.Exit(1)


def _read(file: Path) -> dict[str, Any]:
    try:
        found = orjson.loads(file.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError([f"{file}: {error}"]) from None
    return {"number": found["number"], "mac": found["mac"]}
