"""Names of what is kept: random, so that nobody can guess or count them, with a prefix that tells the kind."""

from __future__ import annotations

import secrets

TENANT, PROJECT, KEY, LIMIT, PRICE, COST = "ten", "proj", "key", "lim", "price", "cost"


def new_id(kind: str) -> str:
    """E.g. ten_5f0c9d1a2b3c4d5e."""
    return f"{kind}_{secrets.token_hex(8)}"
