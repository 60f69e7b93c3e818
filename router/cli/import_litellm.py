"""`warmroute import-litellm`: a LiteLLM proxy's configuration as one of ours."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from router.cli.check import check
from router.cli.office import Office, run
from router.config import from_litellm
from router.errors import ConfigError


def import_litellm(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="LiteLLM's config.yaml.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write ours there. [default: standard output]"),
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Also put its prices into the database that the new file names.")
    ] = False,
) -> None:
    """Turn a LiteLLM proxy's configuration into one of ours.

    Says of each line what became of it, or why nothing did. Engines are deployments with an api_base and OpenAI's
    routes. The new file is checked as by `warmroute check`; exit code 1 if something is left to mend in it.
    """
    if apply and output is None:
        raise typer.BadParameter("--apply needs -o FILE: prices go into the database that it names")
    found = from_litellm(file)
    for remark in found.remarks:
        print(remark, file=sys.stdout if output else sys.stderr)
    if "engines" not in found.data:
        raise ConfigError([f"{file}: nothing in it can be an engine of ours, so there is no file to write"])
    text = f"# From {file.name} by `warmroute import-litellm`.\n{_as_yaml(found.data)}"
    if output is None:
        print(text, end="")
        return
    _write(output, text)
    print("Ours listens on 127.0.0.1 until listen.host says otherwise; tenants, limits and keys are made anew.")
    check(output)
    if apply:
        for line in run(output, lambda office: _apply(office, found.prices)):
            print(line)


def _as_yaml(data: Mapping[str, Any]) -> str:
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)


def _write(file: Path, text: str) -> None:
    """For its owner only: it may hold keys. Never over one that is there."""
    try:
        descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except OSError as error:
        raise ConfigError([f"{file}: {error.strerror}"]) from None
    with open(descriptor, "w", encoding="utf-8") as opened:
        opened.write(text)


async def _apply(office: Office, prices: Mapping[str, Mapping[str, Decimal]]) -> list[str]:
    """A new version of each price that is not so already."""
    lines = []
    for model, per_million in prices.items():
        wanted = {kind: f"{price.normalize():f}" for kind, price in per_million.items()}
        rows = await office.everything("/prices", model=model)
        now = [row for row in rows if row["tenant"] is None and row["currency"] == "USD" and row["valid_to"] is None]
        if any(row["per_million"] == wanted for row in now):
            lines.append(f"price of {model}: as it is already")
        else:
            made = await office.call("POST", "/prices", {"model": model, "currency": "USD", "per_million": wanted})
            lines.append(f"price of {model}: {made['id']}")
    return lines
