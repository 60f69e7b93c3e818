"""Keys: 256 random bits, shown once, kept as an HMAC.

A key is not guessed, so a slow hash would buy nothing; the pepper, which is not in the database, makes a copy of the
database useless for logging in.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Literal

Kind = Literal["inference", "admin"]
_PREFIXES: dict[Kind, str] = {"inference": "sk-", "admin": "sk-admin-"}
_SHOWN = 6  # characters of the random part


def new_key(kind: Kind) -> str:
    """E.g. sk-4VZ…: for completions; sk-admin-4VZ…: for the admin API."""
    return _PREFIXES[kind] + secrets.token_urlsafe(32)


def is_admin_key(key: str) -> bool:
    return key.startswith(_PREFIXES["admin"])


def shown(key: str) -> str:
    """As much of a key as lists and logs may hold: sk-4VZk1a."""
    prefix = _PREFIXES["admin"] if key.startswith(_PREFIXES["admin"]) else _PREFIXES["inference"]
    return key[: len(prefix) + _SHOWN]


def key_mac(pepper: bytes, key: str) -> bytes:
    """32 bytes: what is kept, and looked for."""
    return hmac.digest(pepper, key.encode("utf-8", "surrogatepass"), hashlib.sha256)
