"""What requests would have cost by a policy that does not look at caches, and sums of tags by hour.

Of requests before, nothing is known to differ by policy. Every row of the past is written once: for ten million
requests some minutes, in which no gateway can write. Tags have own costs from now on, and where `warmroute reprice`
makes the sums of earlier days anew.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_COUNTS = (
    "requests", "failed", "aborted", "uncached_input_tokens", "cache_read_tokens", "cache_write_5m_tokens",
    "cache_write_1h_tokens", "cache_write_tokens", "output_tokens", "reasoning_tokens", "media_input_tokens",
    "media_output_tokens", "cached_unknown", "best_hit_tokens", "predicted_hit_tokens", "blind_hit_tokens",
)  # fmt: skip
_WORK = ("prefill_ms", "decode_ms", "kv_token_s")
_MONEY = ("cost", "output_cost", "cost_without_cache", "cost_cache_blind", "own_cost")
_HITS = {"requests": sa.Integer(), "hourly": sa.BigInteger(), "daily": sa.BigInteger(), "daily_tags": sa.BigInteger()}


def upgrade() -> None:
    for table, count in _HITS.items():
        op.add_column(table, sa.Column("blind_hit_tokens", count, nullable=False, server_default="0"))
        op.add_column(table, sa.Column("cost_cache_blind", sa.BigInteger(), nullable=False, server_default="0"))
        op.execute(f"UPDATE {table} SET blind_hit_tokens = predicted_hit_tokens, cost_cache_blind = cost")
    op.create_table(
        "hourly_tags",
        sa.Column("hour", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.String(length=40), nullable=False),
        sa.Column("tag", sa.String(length=100), nullable=False),
        sa.Column("instance", sa.String(length=200), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        *[sa.Column(name, sa.BigInteger(), nullable=False) for name in _COUNTS],
        *[sa.Column(name, sa.Double(), nullable=False) for name in _WORK],
        *[sa.Column(name, sa.BigInteger(), nullable=False) for name in _MONEY],
        sa.PrimaryKeyConstraint("hour", "tenant", "tag", "instance", "currency", name=op.f("pk_hourly_tags")),
    )


def downgrade() -> None:
    op.drop_table("hourly_tags")
    for table in _HITS:
        op.drop_column(table, "cost_cache_blind")
        op.drop_column(table, "blind_hit_tokens")
