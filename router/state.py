"""What a gateway keeps in state_dir, readable for its own user only: secrets, and the database if there is no other."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

from router.config import Config
from router.errors import ConfigError, StoreUnavailable
from router.store import migrate
from router.store.database import Database, open_database

log = logging.getLogger("warmroute")

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


def audit_secret(config: Config, state_dir: Path) -> bytes:
    """What the audit log is chained with."""
    configured = config.admin.auth.audit_secret
    return kept_secret(state_dir, "audit") if configured is None else configured.get_secret_value().encode()


def store_url(config: Config, state_dir: Path) -> str:
    """Of the database; it may hold a password."""
    return migrate.store_url(_configured_url(config), state_dir)


def isolation_secret(config: Config, state_dir: Path) -> bytes:
    """What cache salts are made of."""
    configured = config.isolation.secret
    return kept_secret(state_dir, "isolation") if configured is None else configured.get_secret_value().encode()


async def open_store(config: Config, state_dir: Path) -> Database:
    """The database, made if it is the default one. Raises ConfigError for one that must be upgraded first.

    One that cannot be reached now is opened all the same: the gateway comes up, and answers when the database does.
    """
    url = _configured_url(config)
    try:
        return await migrate.open_store(url, state_dir)
    except ValueError as error:
        raise ConfigError([f"store.url: {error}"]) from None
    except StoreUnavailable as error:
        if url is None:
            raise ConfigError([f"state_dir: the database in {str(state_dir)!r} cannot be opened"]) from error
        log.error("the database cannot be reached")
        return open_database(url)


def _configured_url(config: Config) -> str | None:
    return None if config.store.url is None else config.store.url.get_secret_value()
