from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router.routing import fleet
from tests.faults.deployment import Deployment
from tests.hurry import hurry


@pytest.fixture(autouse=True)
def _faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second of the scenarios is a twentieth here, but for what an engine says in whole seconds."""
    hurry(monkeypatch)
    monkeypatch.setattr(fleet, "OPEN_S", 0.25)
    monkeypatch.setattr(fleet, "OPEN_AT_MOST_S", 1.0)


@pytest.fixture
async def deployment(tmp_path: Path) -> AsyncIterator[Deployment]:
    async with Deployment(tmp_path) as deployment:
        yield deployment
