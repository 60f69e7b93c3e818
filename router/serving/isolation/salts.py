"""Cache salts: what engines are told, so that no domain of isolation finds what another has computed.

    of a domain   HMAC-SHA256( secret, "warmroute cache salt" ‖ version ‖ field(domain) )
    within it     HMAC-SHA256( the domain's salt, field(what the client wrote as its cache_salt) )

`field` is the length as u32, big-endian, and then the bytes, so that no two lists of fields read alike. A salt is
written as 64 hexadecimal digits, which every engine takes (vLLM 0.33: up to 128 characters, none of @ / \\ NUL). What a
client writes never reaches an engine: it names a part of the client's own domain, and nothing outside it.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from router.serving.apis.api import written

CHAT = "/v1/chat/completions"
_EVERYWHERE = frozenset((CHAT, "/v1/completions"))
_ALSO_VLLM = frozenset(("/inference/v1/generate",))
_BY_WAY_OF_CHAT = frozenset(("/v1/messages", "/v1/responses"))

WITHOUT_PREFIX = frozenset(("/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/audio/speech"))
"""Paths on which no engine keeps anything of a prompt."""

_LABEL = b"warmroute cache salt"


class Salts:
    """secret: at least 32 bytes. version: raised, every cache begins anew."""

    def __init__(self, secret: bytes, version: int = 1) -> None:
        self._secret = secret
        self._version = version

    def of(self, domain: str) -> str | None:
        """None: for the open gateway, whose callers are of no domain."""
        if not domain:
            return None
        named = _LABEL + self._version.to_bytes(4, "big") + _field(domain.encode("utf-8", "surrogatepass"))
        return hmac.digest(self._secret, named, sha256).hex()


def salted_paths(
    kind: str, described: Mapping[str, Sequence[frozenset[str]]] | None = None, *, verified: bool = False
) -> frozenset[str]:
    """Where an engine takes `cache_salt`.

    described: the fields of its requests, as it tells them; without that, where every version of its kind does.
    verified: it has been seen to honour one, whatever its kind.
    """
    if described and CHAT in described:
        return frozenset(path for path, forms in described.items() if forms and all("cache_salt" in f for f in forms))
    if kind == "vllm":
        return _EVERYWHERE | _ALSO_VLLM
    return _EVERYWHERE if kind == "sglang" or verified else frozenset()


def kept_apart_on(salted: frozenset[str]) -> frozenset[str]:
    """The paths a client may use without its cache being mixed with others': some go by way of another."""
    return salted | _BY_WAY_OF_CHAT if CHAT in salted else salted


def salt_within(domain_salt: str, wanted: Any) -> str:
    """For a client that keeps parts of its own domain apart. wanted: its `cache_salt`, any JSON value."""
    return hmac.digest(bytes.fromhex(domain_salt), _field(written(wanted)), sha256).hex()


def _field(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data
