"""The isolation report: who shares a cache with whom, which engines keep them apart, what that costs, what remains."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, HTTPException

from router.core import SHARED, Live
from router.store.isolation import TenantRule

Rules = Callable[[], Awaitable[Sequence[TenantRule]]]
"""All tenants. Raises StoreUnavailable."""

RESIDUAL = (
    {"channel": "load", "what": "how busy engines are shows in how long requests wait and take"},
    {
        "channel": "eviction",
        "what": "whoever fills a cache pushes others' blocks out of it; isolation.cold_share bounds it",
    },
    {"channel": "media", "what": "engines cache what they make of images and audio by content, whatever the salt"},
    {"channel": "memory of this gateway", "what": "what is remembered of prompts is bounded for all domains together"},
)
"""What isolation by salts leaves: depends on how much others do, not on what they ask. Dedicated engines end it."""


def isolation_router(live: Live, rules: Rules) -> APIRouter:
    """Its paths stand below /admin/v1/isolation. Administrators of all tenants only: it names who shares with whom."""
    router = APIRouter(tags=["isolation"])

    @router.get("")
    async def report() -> dict[str, Any]:
        """How all tenants' caches are kept apart."""
        state, tenants = await live.isolation(), await rules()
        return {
            "object": "isolation",
            **{name: state[name] for name in ("salt_version", "unverified", "cold_share", "engines")},
            "groups": _groups(tenants),
            "tenants": [_tenant(tenant, tenants, state) for tenant in tenants],
            "residual": list(RESIDUAL),
        }

    @router.get("/{tenant}", responses={404: {"description": "no such tenant"}})
    async def report_of(tenant: str) -> dict[str, Any]:
        """The same for one tenant, by its id or name: which engines it may use, what it holds and loses."""
        state, tenants = await live.isolation(), await rules()
        found = next((one for one in tenants if tenant in (one.id, one.name)), None)
        if found is None:
            raise HTTPException(404, "There is no such tenant.")
        engines = [row | {"open_to_it": _may_use(found, row, state["unverified"])} for row in state["engines"]]
        return {
            **_tenant(found, tenants, state),
            "salt_version": state["salt_version"],
            "engines": engines,
            "residual": list(RESIDUAL),
        }

    return router


def domains_of(tenant: TenantRule) -> list[str]:
    if tenant.isolation == "key":
        return [f"key:{key}" for key in tenant.keys]
    return [f"tenant:{tenant.id}" if tenant.isolation == "tenant" else tenant.isolation]


def _tenant(tenant: TenantRule, tenants: Sequence[TenantRule], state: Mapping[str, Any]) -> dict[str, Any]:
    known: Mapping[str, Any] = state["domains"]
    joint = tenant.isolation == SHARED or tenant.isolation.startswith("group:")
    others = [one.name for one in tenants if one.isolation == tenant.isolation and one.id != tenant.id]
    return {
        "object": "isolation.tenant",
        "tenant": tenant.id,
        "name": tenant.name,
        "isolation": tenant.isolation,
        "shares_with": others if joint else [],
        "labels": tenant.labels,
        "domains": {domain: known.get(domain) for domain in domains_of(tenant)},
    }


def _groups(tenants: Sequence[TenantRule]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for tenant in tenants:
        if tenant.isolation == SHARED or tenant.isolation.startswith("group:"):
            groups.setdefault(tenant.isolation, []).append(tenant.name)
    return groups


def _may_use(tenant: TenantRule, engine: Mapping[str, Any], unverified: str) -> bool:
    labels: Mapping[str, str] = engine["labels"]
    owner = labels.get("tenant")
    if owner is not None and owner not in (tenant.id, tenant.labels.get("tenant")):
        return False
    if any(labels.get(name) != value for name, value in tenant.labels.items()):
        return False
    if tenant.isolation == SHARED or engine["verified"] or unverified == "allow":
        return True
    return unverified == "dedicated" and owner is not None and tenant.isolation != "key"
