"""`warmroute serve`: the gateway."""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated

import typer

from router.cli.options import ConfigFile, Engines, TokenizerName, read_config


def serve(
    config: ConfigFile = None,
    engine: Engines = None,
    host: Annotated[str | None, typer.Option(help="Where clients connect; overrides listen.host.")] = None,
    port: Annotated[int | None, typer.Option(help="Overrides listen.port; 0 takes a free one.")] = None,
    admin_port: Annotated[int | None, typer.Option(help="Overrides admin.port.")] = None,
    tokenizer: TokenizerName = None,
    policy: Annotated[
        str | None, typer.Option(help="An installed policy or module:attr; overrides policy.name.")
    ] = None,
    state_dir: Annotated[str | None, typer.Option(help="Where the index and the secret are kept.")] = None,
) -> None:
    """Run the gateway.

    \b
    With a file:  warmroute serve -c warmroute.yaml
    Without:      warmroute serve --engine http://HOST:8000 --engine http://HOST:8001

    Clients then take http://127.0.0.1:4000/v1 as their base_url. SIGTERM drains it first (listen.drain); so does
    ctrl-c, taking nothing new meanwhile; the second one ends it at once. SIGHUP reads the file again.
    """
    read = partial(
        read_config,
        config,
        engine,
        host=host,
        port=port,
        admin_port=admin_port,
        tokenizer=tokenizer,
        policy=policy,
        state_dir=state_dir,
    )
    found = read()
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    from router.app import run  # here, not at the top: no other command should wait for the whole gateway

    run(found, read_again=None if engine else read)
