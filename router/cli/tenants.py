"""`warmroute tenants` and `warmroute projects`: who the gateway serves."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from router.cli.office import Office, run, show
from router.cli.options import ConfigFile, JsonFile

tenants = typer.Typer(no_args_is_help=True, help="Tenants: whose caches, limits and bills are their own.")
projects = typer.Typer(no_args_is_help=True, help="Projects: a tenant's business lines. Keys belong to one.")

Name = Annotated[str, typer.Argument(metavar="NAME")]
Known = Annotated[str, typer.Argument(metavar="ID|NAME")]
TenantOption = Annotated[str, typer.Option("--tenant", metavar="ID|NAME")]
AnyTenant = Annotated[str | None, typer.Option("--tenant", metavar="ID|NAME", help="Only its own.")]

_TENANT = ("id", "name", "isolation", "priority", "instance_labels")
_PROJECT = ("id", "name", "tenant")


@tenants.command("create")
def create_tenant(
    name: Name,
    isolation: Annotated[
        str, typer.Option(help="Who shares its caches: tenant, key, shared or group:NAME.")
    ] = "tenant",
    config: ConfigFile = None,
    json: JsonFile = None,
) -> None:
    """Make a tenant."""
    show(
        [run(config, lambda o: o.call("POST", "/tenants", {"name": name, "isolation": isolation}))], _TENANT, json=json
    )


@tenants.command("list")
def list_tenants(config: ConfigFile = None, json: JsonFile = None) -> None:
    """All of them."""
    show(run(config, lambda o: o.everything("/tenants")), _TENANT, json=json)


@tenants.command("archive")
def archive_tenant(tenant: Known, config: ConfigFile = None) -> None:
    """Its keys work no more; its books stay."""
    _archive(config, "/tenants", tenant)


@projects.command("create")
def create_project(name: Name, tenant: TenantOption, config: ConfigFile = None, json: JsonFile = None) -> None:
    """Make a project of a tenant."""

    async def work(office: Office) -> Any:
        return await office.call("POST", "/projects", {"name": name, "tenant": await office.find("/tenants", tenant)})

    show([run(config, work)], _PROJECT, json=json)


@projects.command("list")
def list_projects(tenant: AnyTenant = None, config: ConfigFile = None, json: JsonFile = None) -> None:
    """All of them, or a tenant's."""

    async def work(office: Office) -> Any:
        return await office.everything("/projects", tenant=tenant and await office.find("/tenants", tenant))

    show(run(config, work), _PROJECT, json=json)


@projects.command("archive")
def archive_project(project: Known, config: ConfigFile = None) -> None:
    """Its keys work no more."""
    _archive(config, "/projects", project)


def _archive(config: ConfigFile, path: str, name: str) -> None:
    async def work(office: Office) -> Any:
        return await office.call("DELETE", f"{path}/{await office.find(path, name)}")

    typer.echo(f"archived {run(config, work)['id']}")
