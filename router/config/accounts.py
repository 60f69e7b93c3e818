"""The sections of tenants and money: who may ask, what is kept of it and where, what holds over several gateways."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ByteSize, Field, SecretStr

from router.config.section import Section
from router.config.values import MIB, DatabaseUrl, HeaderOfIdentity, LongSecret, Network, Seconds, Size, Text


class Store(Section):
    """The database: tenants, keys, limits, prices, the ledger."""

    url: DatabaseUrl | None = None
    """postgresql://USER:PASSWORD@HOST:PORT/NAME, or sqlite:///PATH. By default SQLite in state_dir, which serves one
    gateway; several need PostgreSQL. Its tables are made and changed by `warmroute db upgrade`, never at a start; only
    the default SQLite file is made by itself."""
    retention_days: Annotated[int, Field(ge=1)] = 90
    """Rows of single requests are kept so long; their sums by hour and day stay."""
    spool_max_bytes: Size = ByteSize(1024 * MIB)
    """While the database is away, finished requests wait in files in state_dir, up to so much; beyond it new requests
    are refused with 503, since none may go unbilled."""


class Redis(Section):
    """What several gateways share: limits, and notice of changes. One gateway needs none."""

    url: SecretStr | None = None
    """redis://[:PASSWORD@]HOST:PORT[/DB], or rediss:// for TLS."""
    timeout_s: Seconds = 0.05
    """A command that takes longer has failed; then limits go by without_redis until Redis answers again."""


class IdentityHeader(Section):
    """Behind another gateway, which has authenticated the caller."""

    name: HeaderOfIdentity
    """The header that holds the id or name of a tenant, as the other gateway sets it; e.g. x-tenant-id. Where it is
    believed it counts, and a key beside it does not. To isolation a tenant that comes so is one key."""
    peers: tuple[Network, ...] = ()
    """It is believed from these addresses or networks only, and ignored from anybody else. Without any: from all
    clients, which then must have shown a certificate (listen.tls.client_ca)."""


class Auth(Section):
    """Who may use port 4000."""

    mode: Literal["auto", "keys", "open"] = "auto"
    """keys: each request needs a key. open: none does, and all are one tenant. auto: keys as soon as there is a tenant,
    without a restart; else open, and then to its own machine only: on another address than loopback requests get 401,
    unless all clients show certificates (listen.tls.client_ca)."""
    header: IdentityHeader | None = None
    """Identity by header instead of by key; by default none."""
    pepper: LongSecret | None = None
    """What keys are hashed with and end users named by, at least 32 characters; several gateways need the same. By
    default made at the first start and kept in state_dir."""
    refresh_s: Seconds = 0.5
    """How often changes of keys, tenants and limits are looked for. A revoked key is refused everywhere within this and
    the time of one query."""
    stale_s: Seconds = 900.0
    """While the database is away known keys go on working so long; after that requests get 503, since a revoked key
    would not be known."""


class Isolation(Section):
    """How tenants' caches are kept apart."""

    secret: SecretStr | None = None
    """What cache salts are made of, at least 32 characters; several gateways need the same. By default made at the
    first start and kept in state_dir. A new one is a cold cache for everybody."""
    version: Annotated[int, Field(ge=1)] = 1
    """Enters each salt: raised, all caches begin anew, under the same secret."""
    unverified: Literal["refuse", "dedicated", "allow"] = "refuse"
    """What becomes of engines that have not been seen to honour salts. refuse: isolated tenants get none of them.
    dedicated: only where its labels give such an engine to one tenant alone (tenant: NAME). allow: as if they did; the
    isolation report tells."""
    open_engines: Literal["note", "refuse"] = "note"
    """Engines that answer without a key can be reached past the gateway by whoever reaches their port. note: report
    and doctor say so. refuse: they count as not verified."""
    safe_fields: tuple[Text, ...] = ()
    """Request fields that you have reviewed: keys may set them, though the catalogue does not know them or refuses
    them."""
    media_hosts: tuple[Text, ...] = ()
    """Hosts from which keys may have engines fetch images, video and audio. By default none: media come as data: URLs,
    since an engine would fetch from inside your network."""
    cold_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """A domain that fills more than this share of a model's KV memory has flushed others' caches: its cold prompts are
    then placed on this share of the engines only. By default on all."""


class Oidc(Section):
    """JWTs of an identity provider."""

    issuer: Text
    """Its iss claim; keys are read from its /.well-known/openid-configuration unless jwks_url says where."""
    audience: Text
    """What their aud claim must hold."""
    jwks_url: Text | None = None
    """Where its public keys are."""
    algorithms: tuple[Literal["RS256", "PS256", "ES256", "EdDSA"], ...] = ("RS256", "ES256")
    """Others are refused, whatever a token says."""
    scope_claim: Text = "scope"
    """Which claim holds the scopes, as a list or separated by blanks: tenants:read, keys:write …, or *."""
    tenant_claim: Text | None = None
    """Which claim holds the id of the one tenant whose things the token may see; a token without it is refused then.
    By default tokens are for all tenants."""


class AdminAuth(Section):
    """Who may use port 4001, besides /healthz, /readyz and /metrics."""

    bootstrap_key: LongSecret | None = None
    """An administrator's key from the configuration, to make the first ones with: at least 32 characters. Without it
    port 4001 is open on loopback until there is an admin key, and closed beyond."""
    audit_secret: LongSecret | None = None
    """What the audit log is chained with, at least 32 characters; several gateways need the same. By default made at
    the first start and kept in state_dir."""
    metrics_open: bool = True
    """false: /metrics asks for a key too."""
    oidc: Oidc | None = None
    """Logins by JWT (needs the oidc extra)."""


class Ledger(Section):
    """What a request cost."""

    enabled: bool = True
    """false: no request leaves a row, and there are no reports."""
    unknown_cached: Literal["full_price", "predicted"] = "full_price"
    """How a prompt is billed whose engine does not say what it had cached. full_price: as if nothing. predicted: by
    what the index predicted. Either way the row says that it is not known."""
    on_missing_price: Literal["allow", "refuse"] = "allow"
    """refuse: a model without a price is not served to keys."""
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")] = "USD"
    """Of engines[].price_per_hour."""
    fsync_s: Seconds | None = None
    """How often what waits in state_dir is brought to the disk itself. By default the system does that, within some
    30 s: a killed gateway loses nothing, a machine without power what came since."""
