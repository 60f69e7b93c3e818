"""What Alembic runs for every command: on the connection it is handed, inside the transaction that is open there."""

from typing import Literal

from alembic import context

from router.store.money import Money
from router.store.schema import metadata


def _render(kind: str, item: object, _: object) -> str | Literal[False]:
    """Steps name the database's types only, so that they stay what they were when ours change."""
    return "sa.BigInteger()" if kind == "type" and isinstance(item, Money) else False


context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_item=_render,
)
context.run_migrations()
