from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.cases.stand import Stand


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[Stand]:
    stand = Stand(tmp_path)
    yield stand
    await stand.stop()
    gc.unfreeze()  # a gateway freezes what was built at its start, and here many are built in one process
