from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router import roster
from router.lab.chat import ChatModel
from tests.flows.site import Site
from tests.hurry import hurry


@pytest.fixture(scope="session")
def chat_model() -> ChatModel:
    return ChatModel()


@pytest.fixture(autouse=True)
def _often_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    monkeypatch.setattr(roster, "KEPT_S", 0.3)


@pytest.fixture
async def site(chat_model: ChatModel, tmp_path: Path) -> AsyncIterator[Site]:
    async with Site(chat_model, tmp_path) as site:
        yield site
