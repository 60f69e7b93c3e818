from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import pytest

from adapters.dns import DnsDiscovery
from router.errors import EngineUnreachable


class Resolver:
    """Answers one after the other; the last one stays."""

    def __init__(self, *answers: Sequence[str] | Exception) -> None:
        self._answers = list(answers)

    async def __call__(self, name: str, port: int) -> Sequence[tuple[Any, ...]]:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in answer]


def discovery(*answers: Sequence[str] | Exception) -> DnsDiscovery:
    return DnsDiscovery("engines.default.svc", 8000, every_s=0, lookup=Resolver(*answers))


NO_NAME = socket.gaierror(socket.EAI_NONAME, "unknown")
NO_SERVER = socket.gaierror(socket.EAI_AGAIN, "temporary failure")


async def test_every_address_is_an_instance() -> None:
    found = await discovery(["10.0.0.1", "10.0.0.2", "10.0.0.1", "fd00::3"]).resolve()
    assert found == {"http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[fd00::3]:8000"}


async def test_a_name_without_addresses_has_no_instances() -> None:
    assert await discovery(NO_NAME).resolve() == set()


async def test_a_failing_server_is_our_error() -> None:
    with pytest.raises(EngineUnreachable) as caught:
        await discovery(NO_SERVER).resolve()
    assert "engines.default.svc" not in str(caught.value)


async def test_changes_are_told_once_and_a_failing_server_changes_nothing() -> None:
    changes = discovery(
        NO_SERVER, ["10.0.0.1"], ["10.0.0.1"], NO_SERVER, ["10.0.0.1", "10.0.0.2"], NO_NAME, ["10.0.0.2"]
    ).changes()
    told = [sorted(await anext(changes)) for _ in range(4)]
    assert told == [
        ["http://10.0.0.1:8000"],
        ["http://10.0.0.1:8000", "http://10.0.0.2:8000"],
        [],
        ["http://10.0.0.2:8000"],
    ]
    await changes.aclose()


async def test_the_systems_resolver_is_asked() -> None:
    assert "http://127.0.0.1:8000" in await DnsDiscovery("localhost", 8000).resolve()
