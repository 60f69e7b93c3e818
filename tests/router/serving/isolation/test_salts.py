from __future__ import annotations

import hmac
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.serving.isolation.salts import Salts, kept_apart_on, salt_within, salted_paths

SECRET = b"s" * 32
CHAT = "/v1/chat/completions"


def test_a_domains_salt_is_the_hmac_it_is_said_to_be() -> None:
    named = b"warmroute cache salt" + b"\0\0\0\3" + b"\0\0\0\x08" + b"tenant:a"
    assert Salts(SECRET, 3).of("tenant:a") == hmac.digest(SECRET, named, sha256).hex()


def test_the_open_gateways_callers_have_none() -> None:
    assert Salts(SECRET).of("") is None


@pytest.mark.parametrize("other", [Salts(b"t" * 32, 1), Salts(SECRET, 2)])
def test_another_secret_or_version_is_a_cold_cache(other: Salts) -> None:
    assert other.of("tenant:a") != Salts(SECRET, 1).of("tenant:a")


@given(st.lists(st.text(), min_size=2, max_size=8, unique=True))
def test_no_two_domains_share_one(domains: list[str]) -> None:
    salts = [Salts(SECRET).of(domain) for domain in domains if domain]
    assert len(set(salts)) == len(salts)


@given(st.sampled_from(["tenant:a", "tenant:b", "key:a"]), st.none() | st.text() | st.lists(st.text()) | st.integers())
def test_a_clients_own_stays_within_its_domain_and_in_a_form_every_engine_takes(domain: str, wanted: Any) -> None:
    salts = Salts(SECRET)
    mine = salt_within(str(salts.of(domain)), wanted)
    assert mine == salt_within(str(salts.of(domain)), wanted)
    assert mine != salts.of(domain)
    assert mine != salt_within(str(salts.of("tenant:c")), wanted)
    assert len(mine) == 64
    assert set(mine) <= set("0123456789abcdef")


def test_a_text_and_a_list_that_read_alike_are_two() -> None:
    domain = str(Salts(SECRET).of("tenant:a"))
    assert salt_within(domain, "x") != salt_within(domain, ["x"]) != salt_within(domain, '["x"]')
    assert salt_within(domain, "\ud800")  # half a character is a name as any other


def test_an_engine_takes_salts_where_every_form_of_its_requests_has_them() -> None:
    with_salt, without = frozenset(("model", "cache_salt")), frozenset(("model",))
    described = {CHAT: [with_salt], "/v1/embeddings": [with_salt, without], "/v1/messages": [without], "/x": []}
    assert salted_paths("sglang", described) == {CHAT}
    assert salted_paths("sglang") == {CHAT, "/v1/completions"}
    assert salted_paths("openai") == frozenset()
    assert salted_paths("openai", verified=True) == {CHAT, "/v1/completions"}


def test_messages_and_responses_are_kept_apart_where_chats_are() -> None:
    assert kept_apart_on(frozenset((CHAT,))) == {CHAT, "/v1/messages", "/v1/responses"}
    assert kept_apart_on(frozenset(("/v1/messages",))) == {"/v1/messages"}
