"""What requests would have cost by a policy that does not look at caches. Of those before, nothing is known to differ.

Every row of the past is written once: for ten million requests some minutes, in which no gateway can write.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_HITS = {"requests": sa.Integer(), "hourly": sa.BigInteger(), "daily": sa.BigInteger(), "daily_tags": sa.BigInteger()}


def upgrade() -> None:
    for table, count in _HITS.items():
        op.add_column(table, sa.Column("blind_hit_tokens", count, nullable=False, server_default="0"))
        op.add_column(table, sa.Column("cost_cache_blind", sa.BigInteger(), nullable=False, server_default="0"))
        op.execute(f"UPDATE {table} SET blind_hit_tokens = predicted_hit_tokens, cost_cache_blind = cost")


def downgrade() -> None:
    for table in _HITS:
        op.drop_column(table, "cost_cache_blind")
        op.drop_column(table, "blind_hit_tokens")
