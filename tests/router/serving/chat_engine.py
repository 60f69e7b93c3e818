"""What an engine that has nothing but chat says, for the APIs that go by way of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.router.serving.stand import EngineSide

WHOLE_CHATS = [
    path
    for path in sorted((Path(__file__).parent / "recordings").glob("*/*.sse"))
    if not any(word in path.stem for word in ("cut", "killed", "sigterm", "n2", "completion"))
]
USAGE = {"prompt_tokens": 72, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 32}}
MISSING = [
    (404, b'{"detail":"Not Found"}'),
    (405, b'{"detail":"Method Not Allowed"}'),
    (404, b"404 page not found"),
    (404, b'{"error":{"code":404,"message":"File Not Found","type":"not_found_error"}}'),
]


def chunk(finish: str | None = None, **delta: object) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: %b\n\n" % json.dumps({"id": "c-1", "model": "served", "choices": [choice]}).encode()


def call(index: int, arguments: str, **more: Any) -> dict[str, Any]:
    named = {"name": more.pop("name")} if "name" in more else {}
    return {"index": index, **more, "function": {**named, "arguments": arguments}}


USAGE_CHUNK = b'data: {"choices":[],"usage":%b}\n\n' % json.dumps(USAGE).encode()
DONE = b"data: [DONE]\n\n"


THOUGHTS_TEXT_AND_CALLS = (
    chunk(role="assistant", content=""),
    chunk(reasoning="h"),
    chunk(reasoning="m"),
    chunk(content="so"),
    chunk(content=" é"),
    chunk(tool_calls=[call(0, "", id="t1", name="f")]),
    chunk(tool_calls=[call(0, '{"a":')]),
    chunk(tool_calls=[call(1, "{}", id="t2", name="g"), call(0, "1}")]),
    chunk("tool_calls"),
    USAGE_CHUNK,
    DONE,
)


def read(body: bytes) -> list[dict[str, Any]]:
    """The events, each of which has the name that its data says."""
    events = []
    for event in body.split(b"\n\n")[:-1]:
        name, data = event.split(b"\n")
        events.append(json.loads(data.removeprefix(b"data: ")))
        assert name == b"event: " + events[-1]["type"].encode()
    return events


def chat_only(status: int, told: bytes, answers: list[bytes] | bytes, *, path: str = "/v1/chat/completions") -> Any:
    async def engine(side: EngineSide) -> None:
        if side.head.split()[1] != path.encode():
            await side.whole(told, status=status)
        elif isinstance(answers, bytes):
            await side.whole(answers)
        else:
            await side.stream(*answers)

    return engine
