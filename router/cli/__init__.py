"""The command line: one file a command, all put together here.

Exit codes: 0 all is well; 1 a check found something, or what was asked cannot be had; 2 the command line or the
configuration is wrong; 130 ctrl-c.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from router import __version__
from router.cli import (
    audit,
    check,
    db,
    demo,
    doctor,
    explain,
    import_litellm,
    keys,
    ledger,
    observe,
    replay,
    report,
    serve,
    sim_engine,
    tenants,
    trace,
)
from router.errors import ConfigError, WarmrouteError

OK, PROBLEM, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130

app = typer.Typer(
    name="warmroute",
    help="One base_url in front of your LLM engines; each request goes where its prefix is already cached.",
    epilog="Exit codes: 0 all is well, 1 a check found something, 2 the command line or the configuration is wrong.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
for command in (
    serve.serve,
    demo.demo,
    check.check,
    doctor.doctor,
    explain.explain,
    sim_engine.sim_engine,
    replay.replay,
    observe.observe,
    ledger.reprice,
    ledger.erase,
    report.report,
    import_litellm.import_litellm,
):
    app.command()(command)
app.add_typer(trace.trace, name="trace")
app.add_typer(db.db, name="db")
app.add_typer(tenants.tenants, name="tenants")
app.add_typer(tenants.projects, name="projects")
app.add_typer(keys.keys, name="keys")
app.add_typer(audit.audit, name="audit")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print it and end."),
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point `warmroute`. Our own errors become one line each on standard error, and an exit code."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="warmroute")
    except ConfigError as error:
        for mistake in error.mistakes:
            print(mistake, file=sys.stderr)
        sys.exit(WRONG_INPUT)
    except WarmrouteError as error:
        print(f"warmroute: {error.message}", file=sys.stderr)
        if error.detail:
            print(error.detail, file=sys.stderr)
        sys.exit(PROBLEM)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
