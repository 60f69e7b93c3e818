"""Puts a model's prompts together from its files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from router.serving.prompt.asked import BodyReader
from router.serving.prompt.cut import Cutter, make_cutter
from router.serving.prompt.dialect import DIALECTS, Dialect
from router.serving.prompt.parity import Parity
from router.serving.prompt.plain_chat import ROLES, PlainChat, learn_plain_chat
from router.serving.prompt.prepare import ModelPrompts, OnDifference, PromptLimits
from router.serving.prompt.template import ChatTemplates, load_chat_templates
from router.serving.prompt.tokenizer import Tokenizer, demo_model, load_tokenizer

log = logging.getLogger(__name__)


def load_prompts(
    model: str,
    *,
    tokenizer: str | None,
    secret: bytes,
    block_sizes: Callable[[], Collection[int]],
    executor: Executor,
    chat_template: Path | None = None,
    template_variables: Mapping[str, Any] | None = None,
    dialect: str = "vllm",
    limits: PromptLimits | None = None,
    unseen_counts: Callable[[], bool] = lambda: False,
    on_difference: OnDifference = "enforce",
) -> ModelPrompts:
    """`tokenizer`: a directory, `tiktoken:NAME@FILE`, `demo`, or None. `template_variables`: the server's defaults.

    Files that cannot be used do not stop the gateway: the model's prompts become approximate and say why, once.
    Takes up to a second for a large vocabulary; call it off the loop.
    """
    reader: BodyReader | None = None
    loaded: Tokenizer | None = None
    reason = "no tokenizer is configured"
    try:
        if tokenizer is not None:
            loaded = load_tokenizer(tokenizer)
            templates = _templates(tokenizer, chat_template)
            reader = read_with(loaded, templates, dialect, template_variables)
    except (OSError, ValueError, TypeError, TemplateError) as error:
        loaded, reason = None, f"the tokenizer or chat template cannot be used: {type(error).__name__}: {error}"
    prompts = ModelPrompts(
        model,
        secret=secret,
        block_sizes=block_sizes,
        executor=executor,
        tokenizer=loaded,
        reader=reader,
        limits=limits,
        unseen_counts=unseen_counts,
        on_difference=on_difference,
    )
    if reader is None:
        prompts.settle(Parity("DEGRADED", reason))
        prompts.parity.log(model)
    return prompts


def _templates(tokenizer: str, file: Path | None) -> ChatTemplates | None:
    if tokenizer == "demo":
        return load_chat_templates(demo_model(), file=file)
    if tokenizer.startswith("tiktoken:"):
        return load_chat_templates(Path(), file=file) if file is not None else None
    return load_chat_templates(Path(tokenizer), file=file)


def read_with(
    tokenizer: Tokenizer, templates: ChatTemplates | None, dialect: str, variables: Mapping[str, Any] | None
) -> BodyReader:
    """A reader, with all that is learned of tokenizer and templates. Takes some 100 ms."""
    compiled = [t for t in (templates.default, templates.tool_use) if t is not None] if templates is not None else []
    cutter = make_cutter(tokenizer, compiled)
    plain = _plain_chats(templates, cutter, variables or {}) if templates is not None else {}
    return BodyReader(_named(dialect), templates, tokenizer, cutter, variables=variables, plain=plain)


def _plain_chats(templates: ChatTemplates, cutter: Cutter, variables: Mapping[str, Any]) -> dict[str, PlainChat]:
    """By the name of the dialect."""
    if templates.default.tells_time:
        return {}  # what it writes today it does not write tomorrow
    found: dict[str, PlainChat] = {}
    for dialect in DIALECTS:

        def render(body: Mapping[str, Any], dialect: Dialect = dialect) -> str:
            return dialect.read(body, templates, variables).render()

        marks = dict.fromkeys(ROLES, templates.default.marks)
        marks["system"] = marks["system"].union(dialect.system_marks)
        chat = learn_plain_chat(render, cutter, marks)
        if chat is not None:
            found[dialect.name] = chat
    return found


def _named(dialect: str) -> Dialect:
    for known in DIALECTS:
        if known.name == dialect:
            return known
    return DIALECTS[-1]  # an engine nobody has described reads messages as they come, until parity says otherwise
