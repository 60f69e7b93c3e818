from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from router import app, roster
from router.lab.chat import ChatModel
from router.routing.feed import Feed
from tests.flows.site import Site


@pytest.fixture(scope="session")
def chat_model() -> ChatModel:
    return ChatModel()


@pytest.fixture(autouse=True)
def _often_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that join, sleep or go are noticed five times as fast: tests wait for the gateway, not for its timers."""
    monkeypatch.setattr(app, "Feed", partial(Feed, poll_s=0.2))
    monkeypatch.setattr(roster, "REFRESH_S", 0.02)
    monkeypatch.setattr(roster, "RETRY_S", 0.1)
    monkeypatch.setattr(roster, "KEPT_S", 0.3)


@pytest.fixture
async def site(chat_model: ChatModel, tmp_path: Path) -> AsyncIterator[Site]:
    async with Site(chat_model, tmp_path) as site:
        yield site
