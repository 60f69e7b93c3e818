"""A trace file: requests in order of arrival, or an error that says where."""

from __future__ import annotations

import math
from contextlib import suppress
from io import BytesIO
from unittest.mock import patch

from router.lab.trace_lines import TraceError
from router.lab.traces import read_trace

WORDS = (
    b"{", b"}", b"[", b"]", b",", b":", b'"', b"\n", b" ", b"null", b"1", b"0.5", b"-1", b"1e308",
    b"99999999999999999999", b'"timestamp"', b'"input_length"', b'"output_length"', b'"hash_ids"', b'"chat_id"',
    b'"parent_chat_id"', b'"turn"', b'"at"', b'"messages"', b'"prompt"', b'"input"', b'"runs"', b'"t"', b'"think"',
    b'"session"', b'"role"', b'"content"',
    b'{"at":0,"messages":[{"role":"user","content":' + b"[" * 1000 + b"]" * 1000 + b"}]}", b"\xff", b'"\\ud83d"',
    b'{"timestamp":0,"input_length":5,"hash_ids":[1]}\n',
    b'{"session":"s","turn":0,"input_length":64,"runs":[[0,1]]}\n',
)  # fmt: skip


def target(data: bytes) -> None:
    lines = [(number, line) for number, line in enumerate(BytesIO(data), 1) if not line.isspace()]
    with patch("router.lab.trace_lines._lines", lambda _path: iter(lines)), suppress(TraceError):
        trace = read_trace("x.jsonl", sessions_per_s=1.0)
        assert trace.requests
        assert all(math.isfinite(request.at) for request in trace.requests)
