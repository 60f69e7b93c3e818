"""JWTs of an identity provider, signed by real keys."""

from __future__ import annotations

import base64
import hmac
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from joserfc import jwk, jwt

from router.admin.oidc import Oidc
from router.errors import Unauthenticated
from tests.router.admin.office import Office, opened

ISSUER, AUDIENCE = "https://id.example.com", "warmroute"
NOW = 1_000_000.0


class Provider:
    """Its discovery document and keys; how often those were asked for."""

    def __init__(self) -> None:
        self.keys = [jwk.ECKey.generate_key("P-256", {"kid": "1", "use": "sig"}, private=True)]
        self.asked = 0
        self.away = False

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.away:
            raise httpx.ConnectError("away")
        if request.url.path.endswith("openid-configuration"):
            return httpx.Response(200, json={"jwks_uri": f"{ISSUER}/keys"})
        self.asked += 1
        return httpx.Response(200, json={"keys": [key.as_dict(private=False) for key in self.keys]})

    def token(self, *, key: Any = None, alg: str = "ES256", **claims: Any) -> str:
        key = key or self.keys[-1]
        said = {"iss": ISSUER, "aud": AUDIENCE, "sub": "ada", "exp": NOW + 600, "scope": "tenants:read keys:write"}
        said = {name: value for name, value in (said | claims).items() if value is not None}
        header = {"alg": alg, "kid": key.kid} if alg != "HS256" else {"alg": alg}
        return str(jwt.encode(header, said, key, algorithms=[alg]))


class Clock:
    at = NOW

    def __call__(self) -> float:
        return self.at


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@pytest.fixture
def provider() -> Provider:
    return Provider()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def _oidc(provider: Provider, clock: Clock, **how: Any) -> Oidc:
    http = httpx.AsyncClient(transport=httpx.MockTransport(provider))
    return Oidc(http, issuer=ISSUER, audience=AUDIENCE, clock=clock, **how)


async def test_a_token_has_the_scopes_it_says(provider: Provider, clock: Clock) -> None:
    oidc = _oidc(provider, clock)
    who = await oidc.administrator(provider.token(scope="tenants:read openid root"))
    assert (who.actor, who.scopes, who.tenant) == ("oidc:ada", frozenset({"tenants:read"}), None)
    who = await oidc.administrator(provider.token(scope=["keys:write", 7]))
    assert who.scopes == frozenset({"keys:write"})
    assert (await oidc.administrator(provider.token(scope=None))).scopes == frozenset()


@pytest.mark.parametrize(
    "claims",
    [
        {"iss": "https://evil.example.com"},
        {"iss": None},
        {"aud": "another"},
        {"aud": None},
        {"exp": NOW - 61},
        {"exp": None},
        {"nbf": NOW + 61},
        {"sub": None},
    ],
)
async def test_what_is_not_for_us_or_not_for_now_is_refused(
    provider: Provider, clock: Clock, claims: dict[str, Any]
) -> None:
    with pytest.raises(Unauthenticated):
        await _oidc(provider, clock).administrator(provider.token(**claims))


async def test_long_subjects_are_told_apart(provider: Provider, clock: Clock) -> None:
    oidc = _oidc(provider, clock)
    one, other = [(await oidc.administrator(provider.token(sub="x" * 90 + end))).actor for end in "ab"]
    assert one != other
    assert len(one) == len(other) == 80


async def test_an_archived_tenants_tokens_open_nothing(provider: Provider, clock: Clock, tmp_path: Path) -> None:
    oidc = _oidc(provider, clock, tenant_claim="org")
    async with opened(tmp_path, tokens=oidc.administrator) as office:
        tenant, _, _ = await office.tenant("acme")
        token = provider.token(org=tenant["id"])
        assert (await office.call("GET", "/tenants", key=token)).status_code == 200
        await office.call("DELETE", f"/tenants/{tenant['id']}")
        assert (await office.call("GET", "/tenants", key=token)).status_code == 401


async def test_an_algorithm_of_the_tokens_own_choice_is_refused(provider: Provider, clock: Clock) -> None:
    """none, and the public key taken as the secret of an HMAC."""
    oidc = _oidc(provider, clock)
    public = provider.keys[0].as_pem(private=False)
    said = provider.token().split(".")[1]
    signed = ".".join((_base64(b'{"alg":"HS256","kid":"1"}'), said))
    forged = ".".join((signed, _base64(hmac.digest(public, signed.encode(), "sha256"))))
    unsigned = ".".join((_base64(b'{"alg":"none"}'), said, ""))
    stranger = provider.token(key=jwk.ECKey.generate_key("P-256", {"kid": "1"}, private=True))
    for token in (forged, unsigned, stranger, "a.b.c", ".."):
        with pytest.raises(Unauthenticated):
            await oidc.administrator(token)


async def test_keys_are_read_again_for_one_that_is_unknown_but_not_for_each(provider: Provider, clock: Clock) -> None:
    oidc = _oidc(provider, clock)
    old = provider.token()
    await oidc.administrator(old)
    provider.keys.append(jwk.ECKey.generate_key("P-256", {"kid": "2", "use": "sig"}, private=True))
    for _ in range(3):
        with pytest.raises(Unauthenticated):
            await oidc.administrator(provider.token())
    assert provider.asked == 1
    clock.at += 31
    await oidc.administrator(provider.token())
    await oidc.administrator(old)
    assert provider.asked == 2


async def test_while_the_provider_is_away_keys_that_were_read_go_on(provider: Provider, clock: Clock) -> None:
    oidc = _oidc(provider, clock)
    provider.away = True
    with pytest.raises(Exception, match="cannot be reached"):
        await oidc.administrator(provider.token())
    provider.away = False
    await oidc.administrator(provider.token())
    provider.away = True
    clock.at += 3601
    await oidc.administrator(provider.token(exp=clock.at + 60))


async def test_a_token_of_one_tenant_is_of_that_one_or_none(provider: Provider, clock: Clock) -> None:
    oidc = _oidc(provider, clock, tenant_claim="org")
    assert (await oidc.administrator(provider.token(org="ten_1"))).tenant == "ten_1"
    for claims in ({}, {"org": 7}, {"org": ["ten_1"]}):
        with pytest.raises(Unauthenticated):
            await oidc.administrator(provider.token(**claims))


@pytest.fixture
async def office(tmp_path: Path, provider: Provider, clock: Clock) -> AsyncIterator[Office]:
    async with opened(tmp_path, tokens=_oidc(provider, clock).administrator) as office:
        yield office


async def test_a_token_opens_the_port(office: Office, provider: Provider) -> None:
    assert (await office.call("GET", "/tenants", key=provider.token())).status_code == 200
    assert (await office.call("GET", "/audit", key=provider.token())).status_code == 403
    assert (await office.call("GET", "/tenants", key=provider.token(aud="x"))).status_code == 401
