"""Administrators by JWT: tokens of an identity provider (OpenID Connect), instead of keys of ours.

Checked are the signature, by an algorithm of ours to choose and a key of the provider's, issuer, audience and times.
Its keys are read once an hour; a token that names an unknown one has them read again, at most every half minute, so
that nobody can make us ask the provider for each request.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from router.admin.access import SCOPES, Administrator
from router.errors import ConfigError, Unauthenticated, WarmrouteError

_KEYS_S = 3600.0
_AGAIN_S = 30.0
_LEEWAY_S = 60
_MOST_BYTES = 1 << 20
_SUBJECT_CHARS = 75
_NOT_VALID = "This token is not valid."

log = logging.getLogger("warmroute.oidc")


class ProviderAway(WarmrouteError):
    status = 503
    type = "server_error"
    code = "identity_provider_unavailable"


class Oidc:
    """`administrator` is what `Access` asks. Raises ConfigError where the oidc extra is not installed."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        *,
        issuer: str,
        audience: str,
        jwks_url: str | None = None,
        algorithms: Sequence[str] = ("RS256", "ES256"),
        scope_claim: str = "scope",
        tenant_claim: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        try:
            from joserfc import errors, jwk, jwt
        except ImportError:
            raise ConfigError(["admin.auth.oidc: needs the oidc extra (pip install 'warmroute[oidc]')"]) from None
        self._http = http
        self._issuer = issuer.rstrip("/")
        self._jwks_url = jwks_url
        self._algorithms = list(algorithms)
        self._scope_claim = scope_claim
        self._tenant_claim = tenant_claim
        self._clock = clock
        self._error, self._decode, self._key_set = errors.JoseError, jwt.decode, jwk.KeySet.import_key_set
        self._claims = jwt.JWTClaimsRegistry(
            now=lambda: int(clock()),
            leeway=_LEEWAY_S,
            iss={"essential": True, "values": [self._issuer, self._issuer + "/"]},
            aud={"essential": True, "value": audience},
            sub={"essential": True},
            exp={"essential": True},
        )
        self._keys: Any = None
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()

    async def administrator(self, token: str) -> Administrator:
        """Raises Unauthenticated, and ProviderAway while its keys cannot be had."""
        claims = await self._verified(token)
        tenant = claims.get(self._tenant_claim) if self._tenant_claim else None
        if self._tenant_claim and not isinstance(tenant, str):
            raise Unauthenticated(_NOT_VALID)  # one tenant, or nothing: never by mistake all of them
        return Administrator(_actor(claims["sub"]), _scopes(claims.get(self._scope_claim)), tenant)

    async def _verified(self, token: str) -> dict[str, Any]:
        keys = await self._current_keys(self._clock() - _KEYS_S)
        for may_be_new in (True, False):
            try:
                claims = dict(self._decode(token, keys, algorithms=self._algorithms).claims)
                self._claims.validate(claims)
            except (self._error, ValueError, TypeError, KeyError) as error:
                newer = await self._current_keys(self._clock() - _AGAIN_S) if may_be_new else keys
                if newer is keys:
                    raise Unauthenticated(_NOT_VALID) from error
                keys = newer
            else:
                return claims
        raise Unauthenticated(_NOT_VALID)

    async def _current_keys(self, not_before: float) -> Any:
        """The provider's keys as they were read at that time or later; old ones rather than none."""
        async with self._reading:
            if self._keys is None or self._read_at < not_before:
                try:
                    self._keys = self._key_set(await self._read_keys())
                except (httpx.HTTPError, self._error, ValueError, TypeError, KeyError) as error:
                    log.warning("the keys of the identity provider cannot be read: %s", type(error).__name__)
                    if self._keys is None:
                        raise ProviderAway("The identity provider cannot be reached now.", retry_after_s=5) from error
                self._read_at = self._clock()
            return self._keys

    async def _read_keys(self) -> Any:
        if self._jwks_url is None:
            self._jwks_url = str((await self._get(f"{self._issuer}/.well-known/openid-configuration"))["jwks_uri"])
        return await self._get(self._jwks_url)

    async def _get(self, url: str) -> Any:
        answer = await self._http.get(url, follow_redirects=False)
        answer.raise_for_status()
        if len(answer.content) > _MOST_BYTES:
            raise ValueError("too long")
        return answer.json()


def _actor(subject: str) -> str:
    """As much of a subject as the audit log has room for, and still one's own."""
    if len(subject) <= _SUBJECT_CHARS:
        return f"oidc:{subject}"
    digest = hashlib.sha256(subject.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return f"oidc:{subject[: _SUBJECT_CHARS - len(digest) - 1]}~{digest}"


def _scopes(claim: object) -> frozenset[str]:
    """Words apart by blanks, or a list of them; what is none of ours does not count."""
    words = claim.split() if isinstance(claim, str) else claim if isinstance(claim, list) else []
    return SCOPES.intersection(word for word in words if isinstance(word, str))
