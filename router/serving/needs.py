"""What a request needs of an engine beside text: not every engine of a model takes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from router.core import Need

_KINDS: Mapping[str, Need] = {
    **dict.fromkeys(("image_url", "input_image", "image", "image_pil", "image_embeds"), "image"),
    **dict.fromkeys(("input_audio", "audio_url", "audio"), "audio"),
    **dict.fromkeys(("video_url", "input_video", "video"), "video"),
}
"""By the type of a content part: OpenAI's chat and Responses, Anthropic's Messages, vLLM's and SGLang's own."""


def needs_of(body: Mapping[str, Any], *, is_text: bool) -> tuple[Need, ...]:
    """In order, each once. `is_text`: all of it has been read as text."""
    tools: tuple[Need, ...] = ("tools",) if body.get("tools") else ()
    return tools if is_text else tuple(sorted({*tools, *_media(body)}))


def _media(body: Mapping[str, Any]) -> Iterable[Need]:
    messages = body.get("messages")
    if messages is None:
        messages = body.get("input")
    if isinstance(messages, list):
        for message in messages:
            if isinstance(message, dict) and isinstance(content := message.get("content"), list):
                yield from _in_parts(content)


def _in_parts(parts: Iterable[Any]) -> Iterable[Need]:
    for part in parts:
        if isinstance(part, dict):
            kind = part.get("type")
            if isinstance(kind, str) and kind in _KINDS:
                yield _KINDS[kind]
            elif kind == "tool_result" and isinstance(part.get("content"), list):  # Anthropic's may hold pictures
                yield from _in_parts(part["content"])
