from __future__ import annotations

from typing import Any

import pytest

from router.serving.tools_order import ToolsOrder


def tool(name: str, **schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **schema}}}


SEARCH = tool("search", properties={"q": {"type": "string"}, "t": {"enum": ["a", "b"]}}, required=["q", "t"])
REORDERED = tool("search", required=["q", "t"], properties={"t": {"enum": ["a", "b"]}, "q": {"type": "string"}})
ALPHA = tool("alpha")


@pytest.mark.parametrize(
    ("first", "second", "count"),
    [
        ([SEARCH, ALPHA], [SEARCH, ALPHA], 0),
        ([SEARCH, ALPHA], [REORDERED, ALPHA], 1),
        ([SEARCH, ALPHA], [ALPHA, SEARCH], 1),
        ([SEARCH, ALPHA], [SEARCH], 0),
        ([tool("x", required=["a", "b"])], [tool("x", required=["b", "a"])], 0),  # lists in a tool mean their order
        ([SEARCH, 1], [1, SEARCH], 1),
    ],
    ids=["the same", "keys", "tools", "fewer", "a list within", "odd shapes"],
)
def test_only_another_order_counts(first: list[Any], second: list[Any], count: int) -> None:
    order = ToolsOrder()
    order.observe("m", first)
    order.observe("m", second)
    assert order.counts.get("m", 0) == count


def test_each_change_of_order_counts() -> None:
    order = ToolsOrder()
    for tools in ([SEARCH], [REORDERED], [REORDERED], [SEARCH]):
        order.observe("m", tools)
    assert order.counts == {"m": 2}


def test_models_are_apart() -> None:
    order = ToolsOrder()
    order.observe("m", [SEARCH])
    order.observe("other", [REORDERED])
    assert order.counts == {}


def test_the_oldest_are_forgotten() -> None:
    order = ToolsOrder(max_lists=2)
    order.observe("m", [SEARCH])
    for name in ("a", "b"):
        order.observe("m", [tool(name)])
    order.observe("m", [REORDERED])
    assert order.counts == {}


def test_a_list_in_use_is_not_forgotten() -> None:
    order = ToolsOrder(max_lists=2)
    order.observe("m", [SEARCH])
    order.observe("m", [tool("a")])
    order.observe("m", [SEARCH])
    order.observe("m", [tool("b")])
    order.observe("m", [REORDERED])
    assert order.counts == {"m": 1}


@pytest.mark.parametrize("tools", [None, [], "x", {"a": 1}, ["\ud83d"], [2**70], ["x" * 70_000]])
def test_what_is_no_list_of_tools_or_cannot_be_read_is_passed_over(tools: object) -> None:
    order = ToolsOrder()
    order.observe("m", tools)
    order.observe("m", tools)
    assert order.counts == {}
