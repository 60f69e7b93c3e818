"""The tables.

identity   tenants › projects › keys. Each row carries the revision of its last change, so that gateways read only what
           is new (`changes`), and nothing older ever replaces what they know.
rules      limits, prices, instance_costs: never changed in place; a new row with its own validity replaces an old one.
ledger     requests: one row a request, append-only, in daily partitions on PostgreSQL. Sums: hourly, hourly_tags,
           daily, daily_tags.
audit      every change by an administrator, each row chained to the one before.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from router.store.money import Money

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# ---------------------------------------------------------------------------------------------------------------------
# Identity

changes = Table(
    "changes",
    metadata,
    Column("id", Integer, primary_key=True),  # 1: there is one row
    Column("revision", BigInteger, nullable=False),  # of the last change to identity and rules
)

tenants = Table(
    "tenants",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("name", String(200), nullable=False, unique=True),
    Column("isolation", String(80), nullable=False),  # tenant | key | shared | group:NAME
    Column("priority", Integer, nullable=False),
    Column("steers", Boolean, nullable=False),  # may set the fields that steer an engine
    Column("instance_labels", JSON, nullable=False),  # of the engines it must be placed on
    Column("metadata", JSON, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("archived_at", Double),
    Column("revision", BigInteger, nullable=False, index=True),
)

projects = Table(
    "projects",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("tenant", ForeignKey("tenants.id"), nullable=False),
    Column("name", String(200), nullable=False),
    Column("metadata", JSON, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("archived_at", Double),
    Column("revision", BigInteger, nullable=False, index=True),
    UniqueConstraint("tenant", "name"),
)

keys = Table(
    "keys",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("kind", String(10), nullable=False),  # inference | admin
    Column("tenant", ForeignKey("tenants.id")),  # None: an admin key over all tenants
    Column("project", ForeignKey("projects.id")),  # None: an admin key
    Column("name", String(200), nullable=False),
    Column("shown", String(20), nullable=False),  # its first characters, to recognise it by
    Column("mac", LargeBinary(32), nullable=False, unique=True),  # HMAC-SHA256 of the key under the pepper
    Column("models", JSON),  # public names it may use; None: all
    Column("scopes", JSON, nullable=False),  # of an admin key
    Column("metadata", JSON, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("revoked_at", Double),  # may lie ahead: a key that was replaced works until then
    Column("replaced_by", String(40)),
    Column("revision", BigInteger, nullable=False, index=True),
    Index("ix_keys_project", "project"),
)

# ---------------------------------------------------------------------------------------------------------------------
# Rules

limits = Table(
    "limits",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("level", String(10), nullable=False),  # tenant | project | key
    Column("owner", String(40), nullable=False),
    Column("measure", String(10), nullable=False),  # requests | tokens | parallel | money
    Column("window", String(20), nullable=False),  # 1m, 1h, 1d, 30d, month …; "" for parallel
    Column("amount", BigInteger, nullable=False),  # requests, weighted tokens, requests at once, 1e-12 of money
    Column("weights", JSON, nullable=False),  # of token classes
    Column("currency", String(3)),
    Column("without_redis", String(20), nullable=False),  # local_share | refuse | allow
    Column("created_at", Double, nullable=False),
    Column("archived_at", Double),
    Column("revision", BigInteger, nullable=False, index=True),
    Index("ix_limits_owner", "owner"),
)

limit_windows = Table(  # what one gateway without Redis has counted, so that a restart forgets no budget
    "limit_windows",
    metadata,
    Column("limit", String(40), primary_key=True),
    Column("window", BigInteger, primary_key=True),  # its first second
    Column("used", BigInteger, nullable=False),
)

prices = Table(
    "prices",
    metadata,
    Column("id", String(40), primary_key=True),  # the price version of ledger rows
    Column("model", String(200), nullable=False),  # public name; "*": every other model
    Column("tenant", ForeignKey("tenants.id")),  # None: for everybody
    Column("currency", String(3), nullable=False),
    Column("per_million", JSON, nullable=False),  # token class -> decimal as text
    Column("valid_from", Double, nullable=False),
    Column("valid_to", Double),
    Column("created_at", Double, nullable=False),
    Column("revision", BigInteger, nullable=False, index=True),
)

instance_costs = Table(
    "instance_costs",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("instance", String(200), nullable=False),
    Column("currency", String(3), nullable=False),
    Column("per_hour", Money, nullable=False),
    Column("valid_from", Double, nullable=False),
    Column("valid_to", Double),
    Column("created_at", Double, nullable=False),
)

# ---------------------------------------------------------------------------------------------------------------------
# Ledger


def _who_and_what() -> list[Column[str]]:
    return [
        Column("tenant", String(40), nullable=False),
        Column("project", String(40), nullable=False),
        Column("key", String(40), nullable=False),
        Column("model", String(200), nullable=False),
        Column("instance", String(200), nullable=False),  # "": none was chosen
    ]


TOKEN_CLASSES = (
    "uncached_input", "cache_read", "cache_write_5m", "cache_write_1h", "cache_write", "output", "reasoning",
    "media_input", "media_output",
)  # fmt: skip
"""Disjoint: each token is in one of them, and its price is that class's."""


def _counts() -> list[Column[int]]:
    return [Column(f"{name}_tokens", BigInteger, nullable=False) for name in TOKEN_CLASSES]


def _work() -> list[Column[float]]:
    """What it cost the engine (`pricing.py`): ms of prefill, ms of decode, KV tokens times seconds."""
    return [Column(name, Double, nullable=False) for name in ("prefill_ms", "decode_ms", "kv_token_s")]


requests = Table(
    "requests",
    metadata,
    Column("day", Integer, primary_key=True),  # days since 1970-01-01 UTC
    Column("id", String(128), primary_key=True),  # ours, unique
    Column("shown_id", String(128)),  # the id that the client brought; None: it was told ours
    Column("at", Double, nullable=False),
    *_who_and_what(),
    Column("end_user", String(64)),  # a pseudonym: HMAC of what the client said
    Column("tags", JSON, nullable=False),
    Column("asked_model", String(200), nullable=False),  # as the client named it
    Column("route", String(60), nullable=False),
    Column("stream", Boolean, nullable=False),
    Column("status", SmallInteger, nullable=False),
    Column("finish", String(20), nullable=False),  # complete | client_gone | upstream_failed | unknown
    Column("error", String(60), nullable=False),
    Column("attempts", SmallInteger, nullable=False),
    *_counts(),
    Column("cached_known", Boolean, nullable=False),  # False: the engine did not say, and cache_read is 0
    Column("estimated", Boolean, nullable=False),  # counts are ours: there was no usage
    Column("best_hit_tokens", Integer, nullable=False),
    Column("predicted_hit_tokens", Integer, nullable=False),
    Column("blind_hit_tokens", Integer, nullable=False, default=0),  # mean of all it could have gone to
    Column("queue_s", Double, nullable=False),
    Column("ttft_s", Double),
    Column("took_s", Double, nullable=False),
    *_work(),
    Column("price", String(40)),  # its version; None: no price was known
    Column("currency", String(3)),
    Column("cost", Money, nullable=False),
    Column("output_cost", Money, nullable=False, default=Decimal(0)),  # its part for output, reasoning, media output
    Column("cost_without_cache", Money, nullable=False),
    Column("cost_cache_blind", Money, nullable=False, default=Decimal(0)),  # expected of a policy blind to caches
    Column("raw_usage", Text),
    Index("ix_requests_tenant_at", "tenant", "at"),
    Index("ix_requests_end_user", "end_user"),
    postgresql_partition_by="RANGE (day)",
)


def _sums() -> list[Column[Any]]:
    return [
        Column("requests", BigInteger, nullable=False),
        Column("failed", BigInteger, nullable=False),
        Column("aborted", BigInteger, nullable=False),
        *_counts(),
        Column("cached_unknown", BigInteger, nullable=False),  # requests whose engine did not say
        Column("best_hit_tokens", BigInteger, nullable=False),
        Column("predicted_hit_tokens", BigInteger, nullable=False),
        Column("blind_hit_tokens", BigInteger, nullable=False),
        *_work(),
        Column("cost", Money, nullable=False),
        Column("output_cost", Money, nullable=False),
        Column("cost_without_cache", Money, nullable=False),
        Column("cost_cache_blind", Money, nullable=False),
        Column("own_cost", Money, nullable=False),  # its part of what the instances cost in that hour
    ]


hourly = Table(
    "hourly",
    metadata,
    Column("hour", Integer, primary_key=True),  # hours since 1970-01-01 UTC
    *[Column(column.name, column.type, primary_key=True) for column in _who_and_what()],
    Column("band", SmallInteger, primary_key=True),  # of prompt length (`bands.py`)
    Column("currency", String(3), primary_key=True),  # "": no price was known
    *_sums(),
)

daily = Table(
    "daily",
    metadata,
    Column("day", Integer, primary_key=True),
    *[Column(column.name, column.type, primary_key=True) for column in _who_and_what()],
    Column("band", SmallInteger, primary_key=True),
    Column("currency", String(3), primary_key=True),
    *_sums(),
    Index("ix_daily_tenant_day", "tenant", "day"),
)

hourly_tags = Table(  # a request is here once for each of its tags
    "hourly_tags",
    metadata,
    Column("hour", Integer, primary_key=True),
    Column("tenant", String(40), primary_key=True),
    Column("tag", String(100), primary_key=True),
    Column("instance", String(200), primary_key=True),
    Column("currency", String(3), primary_key=True),
    *_sums(),
)

daily_tags = Table(
    "daily_tags",
    metadata,
    Column("day", Integer, primary_key=True),
    Column("tenant", String(40), primary_key=True),
    Column("tag", String(100), primary_key=True),
    Column("currency", String(3), primary_key=True),
    *_sums(),
)

instance_hours = Table(  # allocated + idle = cost
    "instance_hours",
    metadata,
    Column("hour", Integer, primary_key=True),
    Column("instance", String(200), primary_key=True),
    Column("currency", String(3), nullable=False),
    Column("cost", Money, nullable=False),
    Column("idle", Money, nullable=False),
    Column(
        "seen_from", Double, nullable=False, default=0.0
    ),  # that it was there in this hour, the first time and the last
    Column("seen_to", Double, nullable=False, default=0.0),
    Column("ranks", SmallInteger, nullable=False, default=1),
    Column("capacity_tokens", BigInteger, nullable=False, default=0),  # of its KV cache; 0: unknown
    Column("per_hour", Money),  # by the configuration of a gateway
)

# ---------------------------------------------------------------------------------------------------------------------
# Audit, and what administrators do

audit = Table(
    "audit",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),  # without gaps
    Column("at", Double, nullable=False),
    Column("actor", String(80), nullable=False),  # key id, oidc subject, or "cli"
    Column("action", String(60), nullable=False),  # key.revoke …
    Column("object", String(80), nullable=False),
    Column("tenant", String(40)),
    Column("before", JSON),
    Column("after", JSON),
    Column("mac", LargeBinary(32), nullable=False),  # HMAC over this row and the mac before it
    Index("ix_audit_tenant_at", "tenant", "at"),
)

idempotency = Table(  # answers to POSTs with an Idempotency-Key, for a day
    "idempotency",
    metadata,
    Column("actor", String(80), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("request", LargeBinary(32), nullable=False),  # SHA-256 of method, route and body
    Column("status", SmallInteger, nullable=False),
    Column("body", Text, nullable=False),
    Column("at", Double, nullable=False),
)

isolation_proofs = Table(
    "isolation_proofs",
    metadata,
    Column("instance", String(200), primary_key=True),
    Column("model", String(200), primary_key=True),
    Column("boot", String(80), nullable=False),  # of the engine's process
    Column("verified", Boolean, nullable=False),
    Column("method", String(20), nullable=False),  # events | usage | counters | none
    Column("detail", Text, nullable=False),
    Column("at", Double, nullable=False),
)
