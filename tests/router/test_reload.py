"""What a new configuration changes, and what waits for a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from router import config
from router.config import Config
from router.reload import compare

ENGINES = "engines: [{url: http://a:1}]\n"


@pytest.fixture
def read(tmp_path: Path) -> Callable[[str], Config]:
    def read(text: str) -> Config:
        file = tmp_path / "w.yaml"
        file.write_text(ENGINES + text)
        return config.load(file, environ={})

    return read


def test_nothing(read: Callable[[str], Config]) -> None:
    taken = compare(read(""), read("listen: {port: 4000}"))
    assert (taken.changed, taken.needs_restart) == ((), ())


def test_what_is_taken_over(read: Callable[[str], Config]) -> None:
    new = read(
        "policy: {weights: {decode: 1}}\n"
        "timeouts: {connect_s: 1}\n"
        "waiting_room: {wait_s: 9}\n"
        "prompt: {wait_ms: 9}\n"
        "models: {a: {aliases: [x]}, 'b.c': {}}\n"
        "listen: {drain: {accept_s: 1}}\n"
    )
    taken = compare(read("models: {a: {}}"), new)
    assert taken.in_force == new
    assert taken.needs_restart == ()
    assert set(taken.changed) == {
        "policy.weights",
        "timeouts.connect_s",
        "waiting_room.wait_s",
        "prompt.wait_ms",
        "models.a",
        "models['b.c']",
        "listen.drain.accept_s",
    }


def test_what_needs_a_restart_stays_as_it_was_and_is_named_every_time(read: Callable[[str], Config]) -> None:
    old = read("")
    new = read(
        "listen: {port: 5000, cors: {origins: [x]}, drain: {finish_s: 7}}\n"
        "admin: {port: 5001}\n"
        "state_dir: other\n"
        "index: {max_bytes: 1MiB}\n"
        "waiting_room: {enabled: false, wait_s: 5}\n"
    )
    taken = compare(old, new)
    waits = ("listen.port", "listen.cors.origins", "admin.port", "state_dir", "waiting_room.enabled", "index.max_bytes")
    assert taken.needs_restart == waits
    assert set(taken.changed) == {"listen.drain.finish_s", "waiting_room.wait_s"}
    assert taken.in_force.listen.port == 4000
    assert taken.in_force.waiting_room.enabled
    again = compare(taken.in_force, new)
    assert (again.changed, again.needs_restart) == ((), waits)


def test_keys_of_engines_are_never_shown(read: Callable[[str], Config]) -> None:
    taken = compare(read(""), read("").model_copy(update={"engines": ()}))
    assert taken.changed == ("engines",)
