"""Chat templates, rendered as Hugging Face's `apply_chat_template` renders them.

(transformers 5.19: `utils/chat_template_utils.py`.) A template comes with a model, so it runs in Jinja's immutable
sandbox. It never comes from a client.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import BuiltinMethodType
from typing import Any, NoReturn

import msgspec
from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from router.serving.prompt.content_marks import content_marks
from router.serving.prompt.reason import Unreadable

_CONTINUE_HERE = (
    "CONTINUE_FINAL_MESSAGE_TAG "  # the mark Hugging Face uses; its trailing space tells whether a template trims
)
_DICT_METHODS = frozenset(dir(dict))
_TEXT_METHODS = frozenset(name for name in dir(str) if not name.startswith(("_", "format")))


class ChatTemplate:
    """One compiled template."""

    def __init__(
        self, source: str, *, specials: Mapping[str, str] | None = None, clock: Callable[[], datetime] = datetime.now
    ) -> None:
        """`specials`: bos_token, eos_token … as the tokenizer names them.

        Raises jinja2.TemplateError for a source that cannot be compiled.
        """
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], cache_size=0
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: clock().strftime(pattern)
        tree = environment.parse(source)
        template = environment.from_string(source)
        self.source = source
        self.variables = frozenset(meta.find_undeclared_variables(tree))
        self.iterates_content = _iterates_content(tree)
        self.marks = content_marks(tree) | {text for text in (specials or {}).values() if text}
        self.tells_time = "strftime_now" in source
        self.knows_developer = '"developer"' in source or "'developer'" in source
        self._specials = dict(specials or {})
        self._context = template.new_context
        self._blocks = template.root_render_func

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt's text. Raises `Unreadable` when the template refuses or fails."""
        if continue_final_message:
            messages = _marked(messages)
        values = {
            **self._specials,
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
            **(variables or {}),
        }
        try:
            text = "".join(self._blocks(self._context(values)))
        except Exception as error:  # a template may fail in any way on a body nobody foresaw
            raise Unreadable(f"the chat template failed: {type(error).__name__}") from error
        return _cut_at_mark(text, messages) if continue_final_message else text


class ChatTemplates(msgspec.Struct, frozen=True):
    """A model's templates. Some models have a second one for requests with tools."""

    default: ChatTemplate
    tool_use: ChatTemplate | None = None

    def pick(self, tools: Sequence[Any] | None) -> ChatTemplate:
        return self.tool_use if tools is not None and self.tool_use is not None else self.default


def load_chat_templates(
    directory: Path, *, file: Path | None = None, clock: Callable[[], datetime] = datetime.now
) -> ChatTemplates | None:
    """From `file`, else `chat_template.jinja`, else `tokenizer_config.json` of a model's directory; None: it has none.

    Raises OSError, ValueError or jinja2.TemplateError for files that cannot be used.
    """
    config_path = directory / "tokenizer_config.json"
    config = json.loads(config_path.read_text("utf-8")) if config_path.is_file() else {}
    specials = {name: _token_text(config[name]) for name in config if name.endswith("_token") and config[name]}
    sources = _sources(directory, config, file)
    if "default" not in sources:
        return None
    compiled = {
        name: ChatTemplate(source, specials=specials, clock=clock)
        for name, source in sources.items()
        if name in ("default", "tool_use")
    }
    return ChatTemplates(default=compiled["default"], tool_use=compiled.get("tool_use"))


def _sources(directory: Path, config: Mapping[str, Any], file: Path | None) -> dict[str, str]:
    beside = directory / "chat_template.jinja"
    if file is not None or beside.is_file():
        return {"default": (file or beside).read_text("utf-8")}
    declared = config.get("chat_template")
    if isinstance(declared, list):
        return {entry["name"]: entry["template"] for entry in declared}
    return {"default": declared} if isinstance(declared, str) else {}


def _token_text(token: object) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


# ---------------------------------------------------------------------------------------------------------------------
# The environment


class _Sandbox(ImmutableSandboxedEnvironment):
    """The same answers as its parent, but without its checks where they cannot fail.

    Message fields, loop counters and plain text methods make up nearly all look-ups of a chat template; checked one by
    one they cost four times as much as the rendering itself.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict:
            if attribute not in _DICT_METHODS:
                try:
                    return obj[attribute]
                except KeyError:
                    return self.undefined(obj=obj, name=attribute)
        elif kind is str:
            if attribute in _TEXT_METHODS:
                return getattr(obj, attribute)
        elif (kind is LoopContext or kind is Namespace) and not attribute.startswith("_"):
            try:
                return getattr(obj, attribute)
            except AttributeError:
                pass
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(obj) is dict or type(obj) is list:
            try:
                return obj[argument]
            except (TypeError, LookupError):
                pass
        return super().getitem(obj, argument)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        if type(obj) is BuiltinMethodType and type(obj.__self__) is str and obj.__name__ in _TEXT_METHODS:
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return obj(*args, **kwargs)
        return super().call(context, obj, *args, **kwargs)


class _GenerationTag(Extension):
    """`{% generation %}` marks assistant text for training. It renders its body, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no chat template means.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


# ---------------------------------------------------------------------------------------------------------------------
# continue_final_message: the last message is left open, so whatever the template puts behind it is cut off


def _marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    final = messages[-1]
    content = final.get("content")
    if isinstance(content, str):
        return [*messages[:-1], {**final, "content": content + _CONTINUE_HERE}]
    if isinstance(content, list):
        for at in range(len(content) - 1, -1, -1):
            part = content[at]
            if isinstance(part, dict) and "text" in part:
                marked = {**part, "text": part["text"] + _CONTINUE_HERE}
                return [*messages[:-1], {**final, "content": [*content[:at], marked, *content[at + 1 :]]}]
    raise Unreadable("continue_final_message without a text to continue")


def _cut_at_mark(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    at = text.rfind(_CONTINUE_HERE.strip())
    if at < 0:
        raise Unreadable("the chat template drops the final message that is to be continued")
    keeps_spaces = text.startswith(_CONTINUE_HERE, at)
    return text[:at] if keeps_spaces else text[:at].rstrip()


# ---------------------------------------------------------------------------------------------------------------------
# Does the template want content as text, or as a list of parts? It wants parts if it loops over a message's content.


def _iterates_content(tree: nodes.Template) -> bool:
    names = _message_names(tree)
    in_macros: set[int] = set()
    for macro in tree.find_all(nodes.Macro):
        contents = _parameters_bound_to_content(tree, macro, names)
        for loop in macro.find_all(nodes.For):
            in_macros.add(id(loop))
            if isinstance(loop.iter, nodes.Name) and loop.iter.name in contents:
                return True
    for loop in tree.find_all(nodes.For):
        if any(_reaches(loop.iter, name, "content") for name in names):
            return True
        if id(loop) not in in_macros and isinstance(loop.iter, nodes.Name) and loop.iter.name == "content":
            return True
    return False


def _message_names(tree: nodes.Template) -> set[str]:
    """Loop variables that run over `messages`, or over a variable made from it."""
    lists = {"messages"}
    while True:
        more = {
            assign.target.name
            for assign in tree.find_all(nodes.Assign)
            if isinstance(assign.target, nodes.Name) and any(_reaches(assign.node, name) for name in lists)
        }
        if more <= lists:
            break
        lists |= more
    return {
        loop.target.name
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and any(_reaches(loop.iter, name) for name in lists)
    }


def _parameters_bound_to_content(tree: nodes.Template, macro: nodes.Macro, names: set[str]) -> set[str]:
    parameters = [argument.name for argument in macro.args]
    bound: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        given = [*zip(parameters, call.args, strict=False), *((keyword.key, keyword.value) for keyword in call.kwargs)]
        bound |= {parameter for parameter, value in given if any(_reaches(value, name, "content") for name in names)}
    return bound & set(parameters)


def _reaches(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether `node` reads `name` (or `name.key`), perhaps through filters, tests and slices."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is not None:
        if isinstance(node, nodes.Getattr):
            found = node.attr == key
        elif isinstance(node, nodes.Getitem):
            found = isinstance(node.arg, nodes.Const) and node.arg.value == key
        else:
            return False
        return found and _reaches_name(node.node, name)
    return _reaches_name(node, name)


def _reaches_name(node: nodes.Node | None, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
