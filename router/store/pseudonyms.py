"""End users as they are kept: never by the name that a client gives them."""

from __future__ import annotations

import hashlib
import hmac

_CHARACTERS = 32


def pseudonym(pepper: bytes, tenant: str, end_user: str) -> str:
    """The same for the same end user of a tenant; nobody without the pepper can tell whose it is, or link tenants."""
    said = f"end user\0{tenant}\0{end_user}".encode("utf-8", "surrogatepass")
    return hmac.digest(pepper, said, hashlib.sha256).hex()[:_CHARACTERS]
