from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

BOTH = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """What uses sockets runs on both loops: their readers differ."""
    return BOTH if item.module.__name__.endswith("test_zmq") else {"uvloop": uvloop.new_event_loop}  # type: ignore[attr-defined]
