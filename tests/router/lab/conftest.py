from __future__ import annotations

import pytest

from router.lab.chat import ChatModel


@pytest.fixture(scope="session")
def chat() -> ChatModel:
    """Read once: it has no state."""
    return ChatModel()
