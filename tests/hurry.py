"""What a whole gateway does by timers, done sooner: tests wait for the gateway, not for its clock."""

from __future__ import annotations

import gc
from functools import partial

import pytest

from router import app, roster
from router.routing.feed import Feed
from router.serving import callers


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that join, sleep or go are noticed five times as fast. For every gateway that the test starts here."""
    monkeypatch.setattr(app, "Feed", partial(Feed, poll_s=0.2))
    monkeypatch.setattr(roster, "REFRESH_S", 0.02)
    monkeypatch.setattr(roster, "RETRY_S", 0.1)
    monkeypatch.setattr(callers, "_CHECK_S", 15.0)  # a database on a busy machine is late, not away
    # A gateway freezes what was built at its start. Many are built in one process here, and frozen ones never go.
    monkeypatch.setattr(gc, "freeze", lambda: None)
