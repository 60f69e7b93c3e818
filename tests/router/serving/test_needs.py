from __future__ import annotations

from typing import Any

import pytest

from router.serving.needs import needs_of

TEXT = {"type": "text", "text": "a"}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}


def said(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


@pytest.mark.parametrize(
    ("body", "needs"),
    [
        ({}, ()),
        ({"prompt": "a"}, ()),
        ({"messages": [{"role": "user", "content": "image_url"}]}, ()),
        ({"messages": [said(TEXT)]}, ()),
        ({"messages": [said(TEXT, IMAGE), said(TEXT), said(IMAGE)]}, ("image",)),
        ({"messages": [said({"type": "input_audio", "input_audio": {}}, {"type": "video_url"})]}, ("audio", "video")),
        ({"messages": [said(IMAGE)], "tools": [{"type": "function"}]}, ("image", "tools")),
        ({"messages": [said(TEXT)], "tools": []}, ()),
        ({"input": [said({"type": "input_image", "image_url": "data:"})]}, ("image",)),
        ({"input": "a"}, ()),
        ({"messages": [said({"type": "tool_result", "content": [{"type": "image", "source": {}}]})]}, ("image",)),
        ({"messages": [said({"type": "tool_result", "content": "image"})]}, ()),
        ({"messages": [said("a", None, 3, {"type": 7}, {"type": ["image"]}), "a", None, {"content": None}]}, ()),
    ],
)
def test_what_a_request_needs_beside_text(body: dict[str, Any], needs: tuple[str, ...]) -> None:
    assert needs_of(body, is_text=False) == needs
    assert needs_of(body, is_text=True) == (("tools",) if "tools" in needs else ())
