from __future__ import annotations

import pytest

from adapters._home import at_home
from router.core import EventSource


async def kept(endpoint: str, url: str, replay: str | None = None) -> tuple[EventSource, ...]:
    return (await at_home([EventSource(0, endpoint, replay)], url))[0]


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("tcp://10.0.0.5:5557", "http://10.0.0.5:8000"),
        ("tcp://127.0.0.1:5557", "http://localhost:8000"),
        ("tcp://localhost:5557", "http://127.0.0.1:8000"),
        ("tcp://[::1]:5557", "http://[::1]:8000"),
        ("tcp://127.0.0.2:5557", "http://127.0.0.1:8000"),  # an address of this machine
        ("ipc:///tmp/events", "http://127.0.0.1:8000"),
    ],
)
async def test_events_at_the_engines_host_are_believed(endpoint: str, url: str) -> None:
    assert await kept(endpoint, url) == (EventSource(0, endpoint),)


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("tcp://10.0.0.6:5557", "http://10.0.0.5:8000"),
        ("tcp://127.0.0.1:5557", "http://10.0.0.5:8000"),
        ("tcp://192.0.2.1:5557", "http://127.0.0.1:8000"),
        ("ipc:///tmp/events", "http://10.0.0.5:8000"),
    ],
)
async def test_events_elsewhere_are_left_out_with_the_mend(endpoint: str, url: str) -> None:
    sources, notes = await at_home([EventSource(0, endpoint)], url)
    assert sources == ()
    assert "engines[].events" in notes[0]


async def test_a_replay_elsewhere_is_left_out_alone() -> None:
    here, elsewhere = "tcp://10.0.0.5:5557", "tcp://10.0.0.6:5657"
    assert await kept(here, "http://10.0.0.5:8000", replay=elsewhere) == (EventSource(0, here),)
