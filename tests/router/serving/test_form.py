"""Forms: what is found in them, and what is none."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.errors import BadRequest
from router.serving.form import Form, read_form

TYPE = b"multipart/form-data; boundary=B"


def part(name: str, value: bytes, *, file: str | None = None, head: bytes = b"") -> bytes:
    filename = f'; filename="{file}"' if file is not None else ""
    return (
        f'--B\r\nContent-Disposition: form-data; name="{name}"{filename}\r\n'.encode()
        + head
        + b"\r\n"
        + value
        + b"\r\n"
    )


def form_of(*parts: bytes, content_type: bytes = TYPE, end: bytes = b"--B--\r\n") -> tuple[Form, bytes]:
    body = b"".join(parts) + end
    return asyncio.run(read_form(body, content_type)), body


def test_small_fields_are_read_and_files_are_not() -> None:
    form, _ = form_of(
        part("file", b"RIFF\r\n--", file="a.wav", head=b"Content-Type: audio/wav\r\n"),
        part("model", "größe".encode()),
        part("stream", b"True"),
        part("prompt", b""),
        part("long", b"x" * 5000),
        part("binary", b"\xff"),
        part("model2", b"x", file="model"),
    )
    assert form.fields == {"model": "größe", "stream": True, "prompt": ""}


@pytest.mark.parametrize(
    "content_type",
    [
        b"multipart/form-data; boundary=B",
        b'Multipart/Form-Data;boundary="B"',
        b"multipart/form-data; charset=utf-8; boundary=B",
        b"multipart/form-data; boundary=B; charset=utf-8",
    ],
)
def test_ways_to_name_a_boundary(content_type: bytes) -> None:
    form, _ = form_of(part("model", b"m"), content_type=content_type)
    assert form.fields == {"model": "m"}
    assert form.content_type == content_type


def test_ways_to_write_a_part() -> None:
    form, _ = form_of(
        b"a preamble\r\n",
        b"--B  \r\ncontent-type: text/plain\r\ncontent-disposition:form-data;name=model\r\n\r\nm\r\n",
        b"--B\r\n\r\nno headers\r\n",
        part("model", b"the last counts"),
        end=b"--B--",
    )
    assert form.fields == {"model": "the last counts"}


def test_what_begins_like_a_boundary_is_content() -> None:
    form, _ = form_of(part("file", b"\r\n--Bx\r\n--B-\r\n--B \r \n\r\n--\r\n--B", file="f"), part("model", b"\r\n--Bm"))
    assert form.fields == {"model": "\r\n--Bm"}


@pytest.mark.parametrize("size", [0, 1, 65_530, 65_536, 65_540, 300_000])
def test_boundaries_are_found_wherever_the_search_is_cut(size: int) -> None:
    for more in range(12):
        form, _ = form_of(part("file", b"\r\n--"[: more % 5] + b"x" * (size + more), file="f"), part("model", b"m"))
        assert form.fields == {"model": "m"}


def test_only_the_models_name_changes() -> None:
    form, body = form_of(part("file", b"model m", file="m"), part("model", b"m"), part("model_x", b"m"))
    assert form.naming("m", body) is body
    named = form.naming("served/näme", body)
    assert named == body.replace(b'"model"\r\n\r\nm\r\n', '"model"\r\n\r\nserved/näme\r\n'.encode())
    unnamed, body = form_of(part("file", b"x", file="f"))
    assert unnamed.naming("served", body) is body


@pytest.mark.parametrize(
    ("body", "content_type", "code"),
    [
        (b"garbage", TYPE, "invalid_form"),
        (b"", TYPE, "invalid_form"),
        (b"--B\r\n", TYPE, "invalid_form"),
        (part("model", b"m"), TYPE, "invalid_form"),
        (part("model", b"m") + b"--B-", TYPE, "invalid_form"),
        (b"--Bx\r\n\r\n", TYPE, "invalid_form"),
        (b"--B\r\nx: " + b"x" * 9_000 + b"\r\n\r\nm\r\n--B--", TYPE, "invalid_form"),
        (part("a", b"m") * 257 + b"--B--", TYPE, "invalid_form"),
        (b"--B\r\n\r\n" + b"\r\n--Bx" * 300 + b"\r\n--B--", TYPE, "invalid_form"),
        (b"{}", b"application/json", "invalid_content_type"),
        (b"--B--", b"multipart/form-data", "invalid_content_type"),
        (b"--B--", b"multipart/form-data; boundary=" + b"x" * 71, "invalid_content_type"),
        (b"--B--", b"", "invalid_content_type"),
    ],
)
def test_what_is_no_form(body: bytes, content_type: bytes, code: str) -> None:
    with pytest.raises(BadRequest) as refused:
        asyncio.run(read_form(body, content_type))
    assert refused.value.code == code


@settings(max_examples=500, deadline=None)
@given(
    st.lists(
        st.sampled_from([b"--B", b"\r\n--B", b"\r\n", b"--", b"\r\n\r\n", part("model", b"m"), b"--B--\r\n", b" "])
        | st.binary(max_size=12),
        max_size=12,
    )
)
def test_any_bytes_are_a_form_or_refused(parts: list[bytes]) -> None:
    body = b"".join(parts)
    try:
        form = asyncio.run(read_form(body, TYPE))
    except BadRequest:
        return
    assert b"--B--" in body
    if "model" in form.fields:
        assert form.naming(form.fields["model"], body) is body
        assert b"served" in form.naming("served", body)
