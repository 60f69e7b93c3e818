from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from router import app, roster
from router.routing import fleet
from router.routing.feed import Feed
from tests.faults.deployment import Deployment


@pytest.fixture(autouse=True)
def _faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second of the scenarios is a twentieth here, but for what an engine says in whole seconds."""
    monkeypatch.setattr(app, "Feed", partial(Feed, poll_s=0.2))
    monkeypatch.setattr(roster, "REFRESH_S", 0.02)
    monkeypatch.setattr(roster, "RETRY_S", 0.1)
    monkeypatch.setattr(fleet, "OPEN_S", 0.25)
    monkeypatch.setattr(fleet, "OPEN_AT_MOST_S", 1.0)


@pytest.fixture
async def deployment(tmp_path: Path) -> AsyncIterator[Deployment]:
    async with Deployment(tmp_path) as deployment:
        yield deployment
