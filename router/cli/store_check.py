"""What `warmroute doctor` says of the database."""

from __future__ import annotations

from router.cli.checkup import Finding
from router.cli.db import database_of
from router.config import Config
from router.errors import ConfigError, StoreUnavailable
from router.store.migrate import check_version, head

_CHECK = "database"


async def check_store(config: Config) -> list[Finding]:
    """None where it is SQLite in state_dir, which makes itself at a start."""
    if config.store.url is None:
        return []
    database = database_of(config)
    try:
        await check_version(database)
    except ConfigError as error:
        seen, _, mend = error.message.removeprefix("store.url: ").partition(": ")
        return [Finding(_CHECK, "*", "fail", seen, mend)]
    except StoreUnavailable:
        return [Finding(_CHECK, "*", "fail", "it cannot be reached", "see store.url, and whether it runs")]
    finally:
        await database.aclose()
    return [Finding(_CHECK, "*", "ok", f"it is at revision {head()}, as it has to be")]
