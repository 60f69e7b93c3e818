"""`warmroute keys`: what clients and administrators show to be let in."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from router.cli.office import Office, run, show
from router.cli.options import ConfigFile, JsonFile
from router.cli.tenants import AnyTenant

keys = typer.Typer(no_args_is_help=True, help="Keys for completions, which belong to a project, and for the admin API.")

KeyId = Annotated[str, typer.Argument(metavar="ID")]

_COLUMNS = ("id", "kind", "name", "shown", "tenant", "project", "models", "scopes", "expires_at", "revoked_at")
_DAY_S = 86_400


@keys.command("create")
def create(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    project: Annotated[str | None, typer.Option(metavar="ID|NAME", help="Of a key for completions.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="The only one it may use. Repeat for more.")] = None,
    admin_scope: Annotated[
        list[str] | None,
        typer.Option(help="Makes it one for the admin API: * or e.g. reports:read. Repeat for more."),
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(metavar="ID|NAME", help="Of a key for the admin API: the only one it sees.")
    ] = None,
    days: Annotated[float | None, typer.Option(help="It works so long; by default for ever.")] = None,
    config: ConfigFile = None,
    json: JsonFile = None,
) -> None:
    """Make a key. It is shown this once."""

    async def work(office: Office) -> Any:
        body: dict[str, Any] = {"name": name, "expires_at": days and time.time() + days * _DAY_S}
        if admin_scope:
            body |= {"kind": "admin", "scopes": admin_scope, "tenant": tenant and await office.find("/tenants", tenant)}
        else:
            body |= {"project": project and await office.find("/projects", project), "models": model}
        return await office.call("POST", "/keys", body)

    _show_new(run(config, work), json)


@keys.command("list")
def list_keys(tenant: AnyTenant = None, config: ConfigFile = None, json: JsonFile = None) -> None:
    """All of them, or a tenant's."""

    async def work(office: Office) -> Any:
        return await office.everything("/keys", tenant=tenant and await office.find("/tenants", tenant))

    show(run(config, work), _COLUMNS, json=json)


@keys.command("rotate")
def rotate(
    key: KeyId,
    grace_s: Annotated[float, typer.Option(help="So long, seconds, the old one works beside the new one.")] = 0.0,
    config: ConfigFile = None,
    json: JsonFile = None,
) -> None:
    """Make a new key in the place of one. It is shown this once."""
    _show_new(run(config, lambda o: o.call("POST", f"/keys/{key}/rotate", {"grace_s": grace_s})), json)


@keys.command("revoke")
def revoke(key: KeyId, config: ConfigFile = None) -> None:
    """It is refused everywhere within seconds."""
    typer.echo(f"revoked {run(config, lambda o: o.call('DELETE', f'/keys/{key}'))['id']}")


def _show_new(made: dict[str, Any], json: JsonFile) -> None:
    show([made], ("id", "name", "tenant", "project"), json=json)
    if str(json) != "-":
        typer.echo(f"\n{made['key']}\n\nThis is the only time it is shown.")
