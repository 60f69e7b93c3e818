"""What the account routes answer, as the OpenAPI schema shows it, and what their POSTs may bring along."""

from __future__ import annotations

from typing import Any

from router.admin.answers import Documented
from router.admin.desk import listing

_CREATED = {"created_at": 1_796_000_000.0}
_KEPT = {**_CREATED, "archived_at": None}

A_TENANT: dict[str, Any] = {
    "id": "ten_5f0c9d1a2b3c4d5e",
    "object": "tenant",
    "name": "acme",
    "isolation": "tenant",
    "priority": 0,
    "steers": False,
    "instance_labels": {},
    "metadata": {"crm": "4711"},
    **_KEPT,
}
A_PROJECT: dict[str, Any] = {
    "id": "proj_5f0c9d1a2b3c4d5e",
    "object": "project",
    "tenant": A_TENANT["id"],
    "name": "search",
    "metadata": {},
    **_KEPT,
}
A_KEY: dict[str, Any] = {
    "id": "key_5f0c9d1a2b3c4d5e",
    "object": "key",
    "kind": "inference",
    "tenant": A_TENANT["id"],
    "project": A_PROJECT["id"],
    "name": "search in production",
    "shown": "sk-Zk3v9a",
    "models": ["llama-3.1-8b"],
    "scopes": [],
    "metadata": {},
    **_CREATED,
    "expires_at": None,
    "revoked_at": None,
    "replaced_by": None,
}
A_NEW_KEY = {**A_KEY, "key": "sk-Zk3v9a…"}
A_LIMIT: dict[str, Any] = {
    "id": "lim_5f0c9d1a2b3c4d5e",
    "object": "limit",
    "level": "tenant",
    "owner": A_TENANT["id"],
    "measure": "tokens",
    "window": "1m",
    "amount": 100_000,
    "weights": {"cache_read": 0.1},
    "currency": None,
    "without_redis": "local_share",
    **_KEPT,
}
A_PRICE: dict[str, Any] = {
    "id": "price_5f0c9d1a2b3c4d5e",
    "object": "price",
    "model": "llama-3.1-8b",
    "tenant": None,
    "currency": "USD",
    "per_million": {"uncached_input": "0.20", "cache_read": "0.02", "output": "0.60"},
    "valid_from": 1_796_000_000.0,
    "valid_to": None,
    **_CREATED,
}
A_COST: dict[str, Any] = {
    "id": "cost_5f0c9d1a2b3c4d5e",
    "object": "instance_cost",
    "instance": "10.0.0.5:8000",
    "currency": "USD",
    "per_hour": "2.49",
    "valid_from": 1_796_000_000.0,
    "valid_to": None,
    **_CREATED,
}

_IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "the same request under the same key is done once, and answered the same for a day",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255},
}


def answers(example: dict[str, Any], status: int = 200) -> Documented:
    return {status: {"content": {"application/json": {"example": example}}}}


def lists(example: dict[str, Any]) -> Documented:
    return answers(listing([example], has_more=False))


def creates(example: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a POST route that makes such an object (`Desk.create`)."""
    extra = {"parameters": [_IDEMPOTENCY_KEY]}
    return {"status_code": 201, "responses": answers(example, 201), "openapi_extra": extra}
