from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.router.serving.stand import Stand


@pytest.fixture
async def stand() -> AsyncIterator[Stand]:
    stand = Stand()
    yield stand
    await stand.stop()
    assert not stand.placement.open, "a booking was not given back"
    assert not stand.started or not stand.gateway.under_way, "a request has no end"
