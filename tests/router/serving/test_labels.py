"""Tags and end users: where clients say them, what is kept of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from router.serving.labels import end_user_in, tags_of
from router.store.pseudonyms import pseudonym
from tests.router.serving.stand import EngineSide, Stand

CHAT = {"model": "m-chat", "messages": [{"role": "user", "content": "hello"}]}
PEPPER = b"p" * 32


@pytest.mark.parametrize(
    ("headers", "tags"),
    [
        ({}, ()),
        ({b"x-warmroute-tags": b"a, b ,,a"}, ("a", "b")),
        ({b"x-litellm-tags": b"c"}, ("c",)),
        ({b"x-litellm-tags": b"c", b"x-warmroute-tags": b"a"}, ("a", "c")),
        ({b"x-warmroute-tags": "größe".encode()}, ("größe",)),
        ({b"x-warmroute-tags": b"a\x1b[31m,b"}, ("b",)),
        ({b"x-warmroute-tags": b"t" * 300}, ("t" * 100,)),
        ({b"x-warmroute-tags": b",".join(b"%d" % n for n in range(99))}, tuple(map(str, range(10)))),
    ],
)
def test_tags(headers: Mapping[bytes, bytes], tags: tuple[str, ...]) -> None:
    assert tags_of(headers) == tags


@pytest.mark.parametrize(
    ("fields", "end_user"),
    [
        ({}, ""),
        ({"user": "u"}, "u"),
        ({"user": "u", "safety_identifier": "s"}, "s"),
        ({"metadata": {"user_id": "m"}}, "m"),
        ({"metadata": {"user_id": "user_1_account_2_session_3"}}, "user_1_account_2"),
        ({"user": 3, "metadata": [1]}, ""),
        ({"user": "", "metadata": {"user_id": None}}, ""),
    ],
)
def test_end_users_in_bodies(fields: dict[str, Any], end_user: str) -> None:
    assert end_user_in(fields) == end_user


def test_pseudonyms() -> None:
    of = partial(pseudonym, PEPPER)
    assert of("ten_1", "ann") == of("ten_1", "ann")
    assert len(of("ten_1", "ann" * 1000)) == 32
    different = {of("ten_1", "ann"), of("ten_2", "ann"), of("ten_1", "bob"), pseudonym(b"q" * 32, "ten_1", "ann")}
    assert len(different) == 4
    assert of("", "\ud800")  # half a character is somebody, too


async def echo(engine: EngineSide) -> None:
    await engine.whole(b'{"choices":[]}')


@pytest.mark.parametrize(
    ("headers", "fields", "named"),
    [
        ({"x-warmroute-end-user": "header"}, {"user": "body"}, "header"),
        ({"x-litellm-end-user-id": "litellm"}, {}, "litellm"),
        ({}, {"user": "body"}, "body"),
        ({}, {}, ""),
    ],
)
async def test_the_outcome_carries_them_and_no_name(
    stand: Stand, headers: dict[str, str], fields: dict[str, Any], named: str
) -> None:
    await stand.start(echo)
    stand.gateway._pseudonym = partial(pseudonym, PEPPER)
    await stand.ask({**CHAT, **fields}, headers={**headers, "x-warmroute-tags": "team-a, nightly"})
    outcome = stand.outcome
    assert outcome.tags == ("team-a", "nightly")
    assert outcome.end_user == (pseudonym(PEPPER, "", named) if named else "")
    assert all(b"x-warmroute" not in line and b"x-litellm" not in line for line in stand.engine.seen[0].head.split())
