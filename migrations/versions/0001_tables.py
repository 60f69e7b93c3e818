"""The tables as they were at first."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("actor", sa.String(length=80), nullable=False),
        sa.Column("action", sa.String(length=60), nullable=False),
        sa.Column("object", sa.String(length=80), nullable=False),
        sa.Column("tenant", sa.String(length=40), nullable=True),
        sa.Column("before", sa.JSON(), nullable=True),
        sa.Column("after", sa.JSON(), nullable=True),
        sa.Column("mac", sa.LargeBinary(length=32), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_audit")),
    )
    op.create_index("ix_audit_tenant_at", "audit", ["tenant", "at"], unique=False)
    op.create_table(
        "changes",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_changes")),
    )
    op.create_table(
        "daily",
        sa.Column("day", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.String(length=40), nullable=False),
        sa.Column("project", sa.String(length=40), nullable=False),
        sa.Column("key", sa.String(length=40), nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("instance", sa.String(length=200), nullable=False),
        sa.Column("band", sa.SmallInteger(), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("failed", sa.BigInteger(), nullable=False),
        sa.Column("aborted", sa.BigInteger(), nullable=False),
        sa.Column("uncached_input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cache_read_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cache_write_5m_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cache_write_1h_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cache_write_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("reasoning_tokens", sa.BigInteger(), nullable=False),
        sa.Column("media_input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("media_output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_unknown", sa.BigInteger(), nullable=False),
        sa.Column("best_hit_tokens", sa.BigInteger(), nullable=False),
        sa.Column("predicted_hit_tokens", sa.BigInteger(), nullable=False),
        sa.Column("prefill_ms", sa.Double(), nullable=False),
        sa.Column("decode_ms", sa.Double(), nullable=False),
        sa.Column("kv_token_s", sa.Double(), nullable=False),
        sa.Column("cost", sa.BigInteger(), nullable=False),
        sa.Column("output_cost", sa.BigInteger(), nullable=False),
        sa.Column("cost_without_cache", sa.BigInteger(), nullable=False),
        sa.Column("own_cost", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "day", "tenant", "project", "key", "model", "instance", "band", "currency", name=op.f("pk_daily")
        ),
    )
    op.create_index("ix_daily_tenant_day", "daily", ["tenant", "day"], unique=False)
    op.create_table(
        "daily_tags",
        sa.Column("day", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.String(length=40), nullable=False),
        sa.Column("tag", sa.String(length=100), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("failed", sa.BigInteger(), nullable=False),
        sa.Column("aborted", sa.BigInteger(), nullable=False),
        sa.Column("uncached_input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cache_read_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cache_write_5m_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cache_write_1h_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cache_write_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("reasoning_tokens", sa.BigInteger(), nullable=False),
        sa.Column("media_input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("media_output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_unknown", sa.BigInteger(), nullable=False),
        sa.Column("best_hit_tokens", sa.BigInteger(), nullable=False),
        sa.Column("predicted_hit_tokens", sa.BigInteger(), nullable=False),
        sa.Column("prefill_ms", sa.Double(), nullable=False),
        sa.Column("decode_ms", sa.Double(), nullable=False),
        sa.Column("kv_token_s", sa.Double(), nullable=False),
        sa.Column("cost", sa.BigInteger(), nullable=False),
        sa.Column("output_cost", sa.BigInteger(), nullable=False),
        sa.Column("cost_without_cache", sa.BigInteger(), nullable=False),
        sa.Column("own_cost", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("day", "tenant", "tag", "currency", name=op.f("pk_daily_tags")),
    )
    op.create_table(
        "hourly",
        sa.Column("hour", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.String(length=40), nullable=False),
        sa.Column("project", sa.String(length=40), nullable=False),
        sa.Column("key", sa.String(length=40), nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("instance", sa.String(length=200), nullable=False),
        sa.Column("band", sa.SmallInteger(), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("failed", sa.BigInteger(), nullable=False),
        sa.Column("aborted", sa.BigInteger(), nullable=False),
        sa.Column("uncached_input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cache_read_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cache_write_5m_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cache_write_1h_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cache_write_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("reasoning_tokens", sa.BigInteger(), nullable=False),
        sa.Column("media_input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("media_output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_unknown", sa.BigInteger(), nullable=False),
        sa.Column("best_hit_tokens", sa.BigInteger(), nullable=False),
        sa.Column("predicted_hit_tokens", sa.BigInteger(), nullable=False),
        sa.Column("prefill_ms", sa.Double(), nullable=False),
        sa.Column("decode_ms", sa.Double(), nullable=False),
        sa.Column("kv_token_s", sa.Double(), nullable=False),
        sa.Column("cost", sa.BigInteger(), nullable=False),
        sa.Column("output_cost", sa.BigInteger(), nullable=False),
        sa.Column("cost_without_cache", sa.BigInteger(), nullable=False),
        sa.Column("own_cost", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "hour", "tenant", "project", "key", "model", "instance", "band", "currency", name=op.f("pk_hourly")
        ),
    )
    op.create_table(
        "idempotency",
        sa.Column("actor", sa.String(length=80), nullable=False),
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("request", sa.LargeBinary(length=32), nullable=False),
        sa.Column("status", sa.SmallInteger(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("actor", "key", name=op.f("pk_idempotency")),
    )
    op.create_table(
        "instance_costs",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("instance", sa.String(length=200), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("per_hour", sa.BigInteger(), nullable=False),
        sa.Column("valid_from", sa.Double(), nullable=False),
        sa.Column("valid_to", sa.Double(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_instance_costs")),
    )
    op.create_table(
        "instance_hours",
        sa.Column("hour", sa.Integer(), nullable=False),
        sa.Column("instance", sa.String(length=200), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("cost", sa.BigInteger(), nullable=False),
        sa.Column("idle", sa.BigInteger(), nullable=False),
        sa.Column("seen_from", sa.Double(), nullable=False),
        sa.Column("seen_to", sa.Double(), nullable=False),
        sa.Column("ranks", sa.SmallInteger(), nullable=False),
        sa.Column("capacity_tokens", sa.BigInteger(), nullable=False),
        sa.Column("per_hour", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("hour", "instance", name=op.f("pk_instance_hours")),
    )
    op.create_table(
        "isolation_proofs",
        sa.Column("instance", sa.String(length=200), nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("boot", sa.String(length=80), nullable=False),
        sa.Column("verified", sa.Boolean(), nullable=False),
        sa.Column("method", sa.String(length=20), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("instance", "model", name=op.f("pk_isolation_proofs")),
    )
    op.create_table(
        "limit_windows",
        sa.Column("limit", sa.String(length=40), nullable=False),
        sa.Column("window", sa.BigInteger(), nullable=False),
        sa.Column("used", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("limit", "window", name=op.f("pk_limit_windows")),
    )
    op.create_table(
        "limits",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("level", sa.String(length=10), nullable=False),
        sa.Column("owner", sa.String(length=40), nullable=False),
        sa.Column("measure", sa.String(length=10), nullable=False),
        sa.Column("window", sa.String(length=20), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("weights", sa.JSON(), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=True),
        sa.Column("without_redis", sa.String(length=20), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("archived_at", sa.Double(), nullable=True),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_limits")),
    )
    op.create_index("ix_limits_owner", "limits", ["owner"], unique=False)
    op.create_index(op.f("ix_limits_revision"), "limits", ["revision"], unique=False)
    op.create_table(
        "requests",
        sa.Column("day", sa.Integer(), nullable=False),
        sa.Column("id", sa.String(length=128), nullable=False),
        sa.Column("shown_id", sa.String(length=128), nullable=True),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("tenant", sa.String(length=40), nullable=False),
        sa.Column("project", sa.String(length=40), nullable=False),
        sa.Column("key", sa.String(length=40), nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("instance", sa.String(length=200), nullable=False),
        sa.Column("end_user", sa.String(length=64), nullable=True),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("asked_model", sa.String(length=200), nullable=False),
        sa.Column("route", sa.String(length=60), nullable=False),
        sa.Column("stream", sa.Boolean(), nullable=False),
        sa.Column("status", sa.SmallInteger(), nullable=False),
        sa.Column("finish", sa.String(length=20), nullable=False),
        sa.Column("error", sa.String(length=60), nullable=False),
        sa.Column("attempts", sa.SmallInteger(), nullable=False),
        sa.Column("uncached_input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cache_read_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cache_write_5m_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cache_write_1h_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cache_write_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("reasoning_tokens", sa.BigInteger(), nullable=False),
        sa.Column("media_input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("media_output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_known", sa.Boolean(), nullable=False),
        sa.Column("estimated", sa.Boolean(), nullable=False),
        sa.Column("best_hit_tokens", sa.Integer(), nullable=False),
        sa.Column("predicted_hit_tokens", sa.Integer(), nullable=False),
        sa.Column("queue_s", sa.Double(), nullable=False),
        sa.Column("ttft_s", sa.Double(), nullable=True),
        sa.Column("took_s", sa.Double(), nullable=False),
        sa.Column("prefill_ms", sa.Double(), nullable=False),
        sa.Column("decode_ms", sa.Double(), nullable=False),
        sa.Column("kv_token_s", sa.Double(), nullable=False),
        sa.Column("price", sa.String(length=40), nullable=True),
        sa.Column("currency", sa.String(length=3), nullable=True),
        sa.Column("cost", sa.BigInteger(), nullable=False),
        sa.Column("output_cost", sa.BigInteger(), nullable=False),
        sa.Column("cost_without_cache", sa.BigInteger(), nullable=False),
        sa.Column("raw_usage", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("day", "id", name=op.f("pk_requests")),
        postgresql_partition_by="RANGE (day)",
    )
    op.create_index("ix_requests_end_user", "requests", ["end_user"], unique=False)
    op.create_index("ix_requests_tenant_at", "requests", ["tenant", "at"], unique=False)
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("isolation", sa.String(length=80), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("steers", sa.Boolean(), nullable=False),
        sa.Column("instance_labels", sa.JSON(), nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("archived_at", sa.Double(), nullable=True),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
        sa.UniqueConstraint("name", name=op.f("uq_tenants_name")),
    )
    op.create_index(op.f("ix_tenants_revision"), "tenants", ["revision"], unique=False)
    op.create_table(
        "prices",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("tenant", sa.String(length=40), nullable=True),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("per_million", sa.JSON(), nullable=False),
        sa.Column("valid_from", sa.Double(), nullable=False),
        sa.Column("valid_to", sa.Double(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name=op.f("fk_prices_tenant")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_prices")),
    )
    op.create_index(op.f("ix_prices_revision"), "prices", ["revision"], unique=False)
    op.create_table(
        "projects",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("archived_at", sa.Double(), nullable=True),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name=op.f("fk_projects_tenant")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_projects")),
        sa.UniqueConstraint("tenant", "name", name=op.f("uq_projects_tenant_name")),
    )
    op.create_index(op.f("ix_projects_revision"), "projects", ["revision"], unique=False)
    op.create_table(
        "keys",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("kind", sa.String(length=10), nullable=False),
        sa.Column("tenant", sa.String(length=40), nullable=True),
        sa.Column("project", sa.String(length=40), nullable=True),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("shown", sa.String(length=20), nullable=False),
        sa.Column("mac", sa.LargeBinary(length=32), nullable=False),
        sa.Column("models", sa.JSON(), nullable=True),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.Column("replaced_by", sa.String(length=40), nullable=True),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["project"], ["projects.id"], name=op.f("fk_keys_project")),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name=op.f("fk_keys_tenant")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_keys")),
        sa.UniqueConstraint("mac", name=op.f("uq_keys_mac")),
    )
    op.create_index("ix_keys_project", "keys", ["project"], unique=False)
    op.create_index(op.f("ix_keys_revision"), "keys", ["revision"], unique=False)
    op.execute("INSERT INTO changes (id, revision) VALUES (1, 0)")


def downgrade() -> None:
    op.drop_index(op.f("ix_keys_revision"), table_name="keys")
    op.drop_index("ix_keys_project", table_name="keys")
    op.drop_table("keys")
    op.drop_index(op.f("ix_projects_revision"), table_name="projects")
    op.drop_table("projects")
    op.drop_index(op.f("ix_prices_revision"), table_name="prices")
    op.drop_table("prices")
    op.drop_index(op.f("ix_tenants_revision"), table_name="tenants")
    op.drop_table("tenants")
    op.drop_index("ix_requests_tenant_at", table_name="requests")
    op.drop_index("ix_requests_end_user", table_name="requests")
    op.drop_table("requests")
    op.drop_index(op.f("ix_limits_revision"), table_name="limits")
    op.drop_index("ix_limits_owner", table_name="limits")
    op.drop_table("limits")
    op.drop_table("limit_windows")
    op.drop_table("isolation_proofs")
    op.drop_table("instance_hours")
    op.drop_table("instance_costs")
    op.drop_table("idempotency")
    op.drop_table("hourly")
    op.drop_table("daily_tags")
    op.drop_index("ix_daily_tenant_day", table_name="daily")
    op.drop_table("daily")
    op.drop_table("changes")
    op.drop_index("ix_audit_tenant_at", table_name="audit")
    op.drop_table("audit")
