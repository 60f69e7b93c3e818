"""Which texts a chat template looks for in a message's content.

A template may read a content that holds `</think>`, say, otherwise than all others. Probing alone would not find that,
so the constants are taken from the places where the template's syntax tree compares, splits or searches a content, or
a value made from one. What is found may be too much, never too little, but for templates that look at characters by
their number; rendering probes (`plain_chat.py`) covers the ways of looking that name no text.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes

_CONTENT = "content"


def content_marks(tree: nodes.Template) -> frozenset[str]:
    """Constants that contents are compared with, but for white space."""
    made_from_content = _names_made_from_content(tree)
    found: set[str] = set()
    for node in tree.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test)):
        if _mentions(node, made_from_content):
            found.update(text for part in _looked_for(node) for text in _texts(part))
    return frozenset(text for text in found - {_CONTENT} if text.strip())


def _names_made_from_content(tree: nodes.Template) -> set[str]:
    """Variables, parameters and macros that may hold a content or a part of it, wherever they stand."""
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    names: set[str] = set()
    while True:
        before = len(names)
        for set_ in tree.find_all(nodes.Assign):
            names |= _names_in(set_.target) if _mentions(set_.node, names) else set()
        for block in tree.find_all(nodes.AssignBlock):
            names |= _names_in(block.target) if _mentions(block, names) else set()
        for loop in tree.find_all(nodes.For):
            names |= _names_in(loop.target) if _mentions(loop.iter, names) else set()
        for call in tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name in macros:
                names |= _parameters_with_content(macros[call.node.name], call, names)
        names |= {name for name, macro in macros.items() if any(_mentions(part, names) for part in macro.body)}
        if len(names) == before:
            return names


def _names_in(target: nodes.Node) -> set[str]:
    if isinstance(target, nodes.Name | nodes.NSRef):
        return {target.name}
    return {name.name for name in target.find_all(nodes.Name)}


def _parameters_with_content(macro: nodes.Macro, call: nodes.Call, names: set[str]) -> set[str]:
    parameters = [argument.name for argument in macro.args]
    given = [*zip(parameters, call.args, strict=False), *((keyword.key, keyword.value) for keyword in call.kwargs)]
    return {parameter for parameter, value in given if _mentions(value, names)}


def _mentions(node: nodes.Node, names: set[str]) -> bool:
    if isinstance(node, nodes.Name):
        return node.name == _CONTENT or node.name in names
    if isinstance(node, nodes.Getattr) and node.attr == _CONTENT:
        return True
    if isinstance(node, nodes.Const):
        return bool(node.value == _CONTENT)  # message['content'], message.get('content')
    return any(_mentions(child, names) for child in node.iter_child_nodes())


def _looked_for(node: nodes.Node) -> list[nodes.Node]:
    if isinstance(node, nodes.Call | nodes.Filter | nodes.Test):
        return [*node.args, *(keyword.value for keyword in node.kwargs)]
    return [node]


def _texts(node: nodes.Node) -> Iterator[str]:
    """Constant texts in an expression, without the names of fields."""
    if isinstance(node, nodes.Const) and isinstance(node.value, str):
        yield node.value
    for child in node.iter_child_nodes(exclude=("arg",) if isinstance(node, nodes.Getitem) else None):
        yield from _texts(child)
