from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pytest

from router.serving.prompt import ModelPrompts, PromptLimits, load_prompts
from router.serving.prompt.cut import Cutter, make_cutter
from router.serving.prompt.prepare import OnDifference
from router.serving.prompt.template import ChatTemplates, load_chat_templates
from router.serving.prompt.tokenizer import Tokenizer, demo_model, load_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer("demo")


@pytest.fixture(scope="session")
def templates() -> ChatTemplates:
    loaded = load_chat_templates(demo_model())
    assert loaded is not None
    return loaded


@pytest.fixture(scope="session")
def cutter(tokenizer: Tokenizer, templates: ChatTemplates) -> Cutter:
    return make_cutter(tokenizer, [templates.default])


@pytest.fixture
def executor() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture
def make_prompts(executor: Executor) -> Callable[..., ModelPrompts]:
    def make(
        *,
        sizes: tuple[int, ...] = (16,),
        tokenizer: str | None = "demo",
        limits: PromptLimits | None = None,
        dialect: str = "vllm",
        unseen_counts: bool = True,
        on_difference: OnDifference = "enforce",
        chat_template: Path | None = None,
    ) -> ModelPrompts:
        return load_prompts(
            "m-chat",
            tokenizer=tokenizer,
            secret=b"secret",
            block_sizes=lambda: sizes,
            executor=executor,
            dialect=dialect,
            limits=limits or PromptLimits(wait_s=10.0),
            unseen_counts=lambda: unseen_counts,
            on_difference=on_difference,
            chat_template=chat_template,
        )

    return make


@pytest.fixture
def prompts(make_prompts: Callable[..., ModelPrompts]) -> ModelPrompts:
    return make_prompts()
