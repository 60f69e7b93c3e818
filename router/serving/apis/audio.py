"""Speech to text, where the sound comes in a form; and text to speech, where it goes out as bytes."""

from __future__ import annotations

from typing import Any

from router.serving.apis.api import Api, Fields
from router.serving.sse import EventRelay, SseRelay

_BYTES_PER_TOKEN = 512  # between MP3 of 64 kbit/s and plain 16-bit samples at 16 kHz, at 50 tokens a second
_LAST = frozenset(("transcript.text.done", "speech.audio.done"))


class Transcriptions(Api):
    is_form = True

    def output_limit(self, fields: Fields) -> int | None:
        return None

    def rough_tokens(self, fields: Fields, body_bytes: int) -> int:
        return max(1, body_bytes // _BYTES_PER_TOKEN)

    def relay(self, *, wants_usage: bool, choices: int) -> EventRelay:
        return AudioRelay(hide_usage=False)


class Speech(Api):
    gathers = False

    def output_limit(self, fields: Fields) -> int | None:
        return None

    def relay(self, *, wants_usage: bool, choices: int) -> EventRelay:
        return AudioRelay(hide_usage=False)


class AudioRelay(SseRelay):
    """Chunks with choices (vLLM), or OpenAI's typed events, which end without a `[DONE]`."""

    __slots__ = ()

    def _is_plain(self, data: bytes) -> bool:
        return b'.done"' not in data and super()._is_plain(data)

    def _chunk(self, chunk: dict[str, Any], event: bytes, payload: bytes) -> bytes:
        event = super()._chunk(chunk, event, payload)
        kind = chunk.get("type")
        if not isinstance(kind, str):
            return event
        self.first_token = True
        if kind in _LAST:
            self.done, self.tail = True, event
            return b""
        return event
