"""`python -m migrations NAME; make fix`: the next step, from what schema.py has and the history has not. Read it!"""

import asyncio
import sys

from alembic import command
from sqlalchemy import Connection

from router.store.database import open_database
from router.store.migrate import alembic_config, head, upgrade


async def _write(message: str) -> None:
    database = open_database("sqlite:///:memory:")
    await upgrade(database)
    async with database.write() as connection:
        await connection.run_sync(_revision, message)
    await database.aclose()


def _revision(connection: Connection, message: str) -> None:
    number = int(head() or 0) + 1
    command.revision(alembic_config(connection), message, autogenerate=True, rev_id=f"{number:04}")


asyncio.run(_write(sys.argv[1]))
