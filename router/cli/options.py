"""Options that several commands share, and the configuration they add up to."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from router import config, plugins
from router.config import Config, Mistake, PolicyChoice
from router.errors import ConfigError
from router.lab.traces import Trace, TraceError, read_trace

DEFAULT_FILE = Path("warmroute.yaml")

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "-c", "--config", metavar="FILE", help="The configuration. [default: ./warmroute.yaml if it is there]"
    ),
]
Engines = Annotated[
    list[str] | None,
    typer.Option("--engine", metavar="URL", help="Instead of a file: an engine's http://HOST:PORT. Repeat for more."),
]
TokenizerName = Annotated[
    str | None,
    typer.Option(help="For models the file does not name: a directory with tokenizer.json, demo, engine or none."),
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Also write the figures there as JSON; - is standard output."),
]


def read_config(file: Path | None, engines: Sequence[str] | None, **flags: Any) -> Config:
    """From the file or the engines' URLs, plugins included. Raises ConfigError with every mistake."""
    if file and engines:
        raise typer.BadParameter("give either -c FILE or --engine URL, not both")
    if engines:
        return config.from_flags(engines, flags=flags, check=plugin_mistakes)
    if not file and not DEFAULT_FILE.exists():
        raise typer.BadParameter("give -c FILE, or --engine URL for every engine (there is no ./warmroute.yaml)")
    return config.load(file or DEFAULT_FILE, flags=flags, check=plugin_mistakes)


def read_load(file: Path, **how: Any) -> Trace:
    """`read_trace`, with what is wrong as a ConfigError."""
    try:
        return read_trace(file, **how)
    except TraceError as error:
        raise ConfigError([str(error)]) from None
    except OSError as error:
        raise ConfigError([f"{file}: {error.strerror}"]) from None


def plugin_mistakes(found: Config) -> Iterator[Mistake]:
    """Policies and adapters that are named but cannot be loaded."""
    yield from _not_loading(plugins.POLICIES, found.policy.name, ("policy", "name"))
    yield from _unfit_weights(found.policy)
    for position, name in enumerate(found.policy.shadow):
        yield from _not_loading(plugins.POLICIES, name, ("policy", "shadow", position))
    for name, model in found.models.items():
        if model.policy:
            yield from _not_loading(plugins.POLICIES, model.policy, ("models", name, "policy"))
    for position, engine in enumerate(found.engines):
        if engine.kind != "auto":
            yield from _not_loading(plugins.ADAPTERS, engine.kind, ("engines", position, "kind"))


def _unfit_weights(policy: PolicyChoice) -> Iterator[Mistake]:
    """What the policy itself says of its weights."""
    try:
        plugins.load(plugins.POLICIES, policy.name)(policy.weights, random.Random(0))
    except ConfigError:
        pass  # it is not there: said already
    except ValueError as error:
        yield ("policy", "weights"), str(error)


def _not_loading(group: str, name: str, where: tuple[str | int, ...]) -> Iterator[Mistake]:
    try:
        plugins.load(group, name)
    except ConfigError as error:
        for mistake in error.mistakes:
            yield where, mistake
