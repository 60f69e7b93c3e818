"""What a gateway keeps in state_dir, readable for its own user only: secrets, and the database if there is no other."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from router.config import Config
from router.errors import ConfigError, StoreUnavailable
from router.store.create import create
from router.store.database import Database, open_database

_SECRET_BYTES = 32


def kept_secret(state_dir: Path, name: str) -> bytes:
    """Random bytes, made at the first start. Of several processes that start at once, all get the same."""
    path = state_dir / name
    try:
        return path.read_bytes()
    except FileNotFoundError:
        draft = state_dir / f".{name}-{secrets.token_hex(8)}"
    with open(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(secrets.token_bytes(_SECRET_BYTES))
    try:
        os.link(draft, path)
    except FileExistsError:  # another process was first
        pass
    finally:
        draft.unlink()
    return path.read_bytes()


def deployment_secret(state_dir: Path) -> bytes:
    """All block keys hang on it."""
    return kept_secret(state_dir, "secret")


def pepper(config: Config, state_dir: Path) -> bytes:
    """What keys are hashed with, and end users named by."""
    configured = config.auth.pepper
    return kept_secret(state_dir, "pepper") if configured is None else configured.get_secret_value().encode()


async def open_store(config: Config, state_dir: Path) -> Database:
    """The database, which is not connected to yet; the default one is made if it is not there. Raises ConfigError."""
    if config.store.url is not None:
        return open_database(config.store.url.get_secret_value())
    path = state_dir / "warmroute.db"
    database = open_database(f"sqlite:///{path}")
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # the files beside it get the same mode
        await create(database)
    except (OSError, StoreUnavailable) as error:
        await database.aclose()
        raise ConfigError([f"state_dir: the database {str(path)!r} cannot be opened"]) from error
    return database
