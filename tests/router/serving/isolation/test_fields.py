from __future__ import annotations

from typing import Any

import pytest

from router.core import Caller
from router.errors import BadRequest
from router.serving.form import Form
from router.serving.isolation.catalogue import OURS, SAFE, STEERING, unreviewed
from router.serving.isolation.fields import FieldRules

ISOLATED = Caller(tenant="a", domain="tenant:a", salt="s" * 64)
SHARING = Caller(tenant="a", domain="shared", salt="s" * 64)
STEERS = Caller(tenant="a", domain="tenant:a", salt="s" * 64, steers=True)
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}


def refused(fields: dict[str, Any], caller: Caller = ISOLATED, **rules: Any) -> str:
    """What the client is told; empty: nothing is wrong."""
    try:
        FieldRules(**rules).check(CHAT | fields, None, caller)
    except BadRequest as error:
        return error.message
    return ""


def saying(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def test_no_name_is_in_two_parts_of_the_catalogue() -> None:
    assert not SAFE & STEERING
    assert not OURS & (SAFE | STEERING)


@pytest.mark.parametrize("name", sorted(STEERING))
def test_what_steers_is_refused_by_name_unless_the_key_may(name: str) -> None:
    value = 1 if name == "priority" else "x"
    assert name in refused({name: value})
    assert name in refused({name: value}, SHARING)
    assert not refused({name: value}, STEERS)
    assert not refused({name: None})
    assert not refused({name: value}, safe=[name])


def test_all_are_named() -> None:
    assert (
        refused({"rid": "a", "priority": -1000, "frobnicate": 1}) == "This key may not set: rid, priority, frobnicate."
    )


def test_a_priority_of_none_is_no_priority() -> None:
    assert not refused({"priority": 0})


def test_what_nobody_reviewed_is_refused_only_where_caches_are_kept_apart() -> None:
    assert "frobnicate" in refused({"frobnicate": 1})
    assert not refused({"frobnicate": 1}, SHARING)
    assert not refused({"frobnicate": 1}, safe=["frobnicate"])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (
            {"sampling_params": {"temperature": 0, "extra_args": {"kv_transfer_params": {}}}},
            "sampling_params.extra_args",
        ),
        ({"sampling_params": {"frobnicate": 1}}, "sampling_params.frobnicate"),
        (
            {"chat_template_kwargs": {"enable_thinking": False, "chat_template": "x"}},
            "chat_template_kwargs.chat_template",
        ),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        (
            saying({"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "file:///etc/x"}}),
            "image_url",
        ),
        (saying({"type": "image_url", "image_url": "http://169.254.169.254/"}), "image_url by URL"),
        (saying({"type": "image_url", "image_url": {"url": "/etc/x.png"}}), "image_url by URL"),
        (saying({"type": "image_url", "image_url": None, "uuid": "theirs"}), "uuid"),
        (saying({"type": "image_url", "image_url": {"url": "data:image/png;base64,", "uuid": "theirs"}}), "uuid"),
        (saying({"type": "image_embeds", "image_embeds": "AAAA"}), "image_embeds"),
        (saying({"type": "image", "source": {"type": "url", "url": "https://x/"}}), "source by URL"),
        (
            saying({"type": "tool_result", "content": [{"type": "image", "source": {"url": "http://x"}}]}),
            "source by URL",
        ),
        ({"input": [{"content": [{"type": "input_image", "image_url": "http://x"}]}]}, "input: image_url by URL"),
        ({"input": [{"type": "function_call_output", "output": [{"image_url": "http://x"}]}]}, "input: image_url"),
        ({"input": [{"image": "http://x"}]}, "input: image by URL"),
        ({"images": ["http://x"]}, "images: media by URL"),
        ({"documents": [{"content": [{"image_url": {"url": "http://x"}}]}]}, "documents: image_url by URL"),
    ],
)
def test_what_is_nested_counts_too(fields: dict[str, Any], named: str) -> None:
    assert named in refused(fields)
    assert not refused(fields, STEERS)


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling_params": {"temperature": 0, "max_tokens": 3, "seed": 1}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        saying({"type": "text", "text": "http://x file:///y uuid"}),
        saying({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}}),
        saying({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}),
        saying({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}),
        {"images": ["data:image/png;base64,AAAA"], "input": "x", "documents": ["a", {"text": "b"}]},
        {"messages": [], "input": [[1, 2], [3]]},
    ],
)
def test_a_callers_own_content_passes(fields: dict[str, Any]) -> None:
    assert not refused(fields)


def test_hosts_that_are_named_may_be_fetched_from() -> None:
    for url, may in (
        ("https://cdn.example/x.png", True),
        ("http://cdn.example:8080/x", True),
        ("https://cdn.example.evil/x", False),
        ("https://evil/cdn.example", False),
        ("file://cdn.example/x", False),
        ("http://[broken", False),
    ):
        told = refused(saying({"type": "image_url", "image_url": {"url": url}}), media_hosts=["cdn.example"])
        assert (told == "") is may, url


def test_a_form_is_read_for_the_names_of_its_fields() -> None:
    form = Form(b"multipart/form-data; boundary=x")
    form.names = {"file", "model", "language"}
    FieldRules().check({}, form, ISOLATED)
    for name in ("cache_salt", "vllm_xargs", "frobnicate"):
        form.names = {"file", name}
        with pytest.raises(BadRequest, match=name):
            FieldRules().check({}, form, ISOLATED)


def test_fields_of_our_routes_that_the_catalogue_does_not_know_are_found() -> None:
    described = {
        "/v1/chat/completions": [frozenset(("model", "rid", "frobnicate")), frozenset(("twiddle",))],
        "/not/ours": [frozenset(("whatever",))],
    }
    assert list(unreviewed(described)) == [("/v1/chat/completions", "frobnicate"), ("/v1/chat/completions", "twiddle")]
