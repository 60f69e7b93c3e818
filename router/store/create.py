"""The tables of the default SQLite file, which nobody has to make.

Until there are migrations this is done by the schema itself.
"""

from __future__ import annotations

from router.store.database import Database
from router.store.schema import metadata


async def create(database: Database) -> None:
    """Does nothing to tables that are there. Raises StoreUnavailable."""
    async with database.write() as connection:
        await connection.run_sync(metadata.create_all)
