"""What clients may ask for, and by which rules it is placed: a client of `core.Live`, with the prices beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter

from router import plugins
from router.admin.access import Needs
from router.admin.desk import Desk
from router.core import Live
from router.store.prices import ANY_MODEL, PriceRow, prices_in_force


def models_router(live: Live, desk: Desk | None, needs: Needs) -> APIRouter:
    """`desk`: None where there is no database, and then no prices."""
    router = APIRouter(tags=["models"])
    see = [needs("fleet:read", all_tenants=True)]

    @router.get("/models", dependencies=see)
    async def models() -> dict[str, Any]:
        """One row a public name: aliases, adapters, split, fallbacks, policy, engines and how many are ready, price.

        `state`: ready, unready (no engine of it is), pending (none has joined yet), or split (others answer for it).
        `price`: what everybody pays now; null: nothing, or what the tenant's own price says.
        """
        rows = await live.models()
        prices = {} if desk is None else await _prices(desk)
        data = [{**row, "object": "model", "price": prices.get(row["id"], prices.get(ANY_MODEL))} for row in rows]
        return {"object": "list", "data": data}

    @router.get("/policies", dependencies=see)
    async def policies() -> dict[str, Any]:
        """One row a policy that is installed or used: where it decides, with which weights, or what it saw as a shadow.

        `shadow`: counts since the start of how often it would have chosen otherwise; null: it is none.
        """
        used = {row["id"]: row for row in await live.policies()}
        installed = await asyncio.to_thread(plugins.names, plugins.POLICIES)
        idle: dict[str, Any] = {"default": False, "models": [], "weights": {}, "shadow": None}
        rows = {name: {"id": name, **idle} for name in installed} | used
        data = [{**row, "object": "policy", "installed": name in installed} for name, row in rows.items()]
        return {"object": "list", "data": data}

    return router


async def _prices(desk: Desk) -> Mapping[str, dict[str, Any]]:
    """By model."""
    async with desk.database.read() as connection:
        found = await prices_in_force(connection, desk.clock())
    return {model: _shown(row) for model, row in found.items()}


def _shown(row: PriceRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "currency": row.currency,
        "per_million": dict(row.per_million),
        "valid_from": row.valid_from,
    }
