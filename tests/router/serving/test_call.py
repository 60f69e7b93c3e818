"""What is read of a request, and nothing more."""

from typing import Any

import orjson
import pytest

from router.core import Prompt
from router.errors import BadRequest
from router.serving.apis import CHAT, COMPLETIONS
from router.serving.call import Call
from router.serving.models import Models, ServedModel


class NoPrompts:
    def observe(self, prompt: Prompt, engine_tokens: int) -> None:
        pass

    async def prepare(self, path: str, body: Any, **_: Any) -> Prompt:
        return Prompt(tokens=0, known_tokens=0, keys={})


MODELS = Models([ServedModel("m", NoPrompts())])


def call(path: str = CHAT, **fields: Any) -> Call:
    return Call(path, orjson.dumps({"model": "m", **fields}), headers={}, models=MODELS)


def test_a_clients_salt_keeps_its_prompt_apart() -> None:
    assert call(cache_salt="tenant-a").salt == "tenant-a"
    assert call().salt is None
    assert call(cache_salt="").salt is None
    assert call(cache_salt=7).salt is None  # the engine refuses it


def test_an_extra_key_gets_a_root_no_event_has() -> None:
    """SGLang 0.5.23 keeps caches of different `extra_key` apart, but its events show neither key nor another hash."""
    salts = {call(extra_key="a").salt, call(extra_key="b").salt, call(extra_key="a", cache_salt="s").salt}
    assert len(salts) == 3
    assert not salts & {None, "a", "b", "s"}


@pytest.mark.parametrize(
    ("path", "fields", "choices"),
    [
        (CHAT, {}, 1),
        (CHAT, {"n": 3}, 3),
        (CHAT, {"n": True}, 1),
        (CHAT, {"n": 16_385}, 16_384),
        (COMPLETIONS, {"prompt": ["a", "b"], "n": 2}, 4),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, 1),
        (COMPLETIONS, {"prompt": [[1], [2]]}, 2),
    ],
)
def test_choices_of_the_answer(path: str, fields: dict[str, Any], choices: int) -> None:
    assert call(path, **fields).choices == choices


def test_an_extra_key_of_any_shape_keeps_its_prompt_apart() -> None:
    nested = "[" * 1000 + "]" * 1000
    bodies = [f'{{"model":"m","cache_salt":{salt},"extra_key":{nested}}}' for salt in ('"s"', "null", nested)]
    salts = [Call(CHAT, body.encode(), headers={}, models=MODELS).salt for body in bodies]
    assert salts == [f"s\0extra_key\0{nested}", f"\0extra_key\0{nested}", f"\0extra_key\0{nested}"]


@pytest.mark.parametrize("user", ["me", r"\ud83d"])
def test_how_deep_a_body_may_nest_depends_on_no_parser(user: str) -> None:
    """A lone surrogate has the body read by another parser, which in later Pythons goes deeper."""
    body = '{"model":"m","user":"%s","x":%s%s}'
    assert len(Call(CHAT, (body % (user, "[" * 800, "]" * 800)).encode(), headers={}, models=MODELS).body) > 1600
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        deeper = body % (user, opening * 1100, ("" if closing == "]" else "1") + closing * 1100)
        with pytest.raises(BadRequest) as refused:
            Call(CHAT, deeper.encode(), headers={}, models=MODELS)
        assert refused.value.code == "invalid_json"


def test_numbers_of_any_size_stay_within_what_sums_and_sockets_can_hold() -> None:
    """A lone surrogate has the body read by a parser whose integers have no end."""
    body = b'{"model":"m","user":"\\ud83d","n":%d,"max_tokens":%d}' % (10**400, 10**400)
    odd = Call(CHAT, body, headers={}, models=MODELS)
    assert odd.choices == 16_384
    assert odd.ask("r", Prompt(tokens=0, known_tokens=0, keys={})).max_output_tokens is None
