"""The models clients can name: public names, their aliases and their LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol, Unpack

import msgspec

from router.core import Prompt
from router.errors import BadRequest, Forbidden, NoEngine, UnknownModel
from router.serving.deadlines import TimeLimits
from router.serving.failover import FailoverRule
from router.serving.prompt.pieces import ReadFor
from router.serving.split import Arm

_SHOWN_CHARS = 100
_JOINING_S = 2.0


class Prompts(Protocol):
    """Reads the prompts of one model (`serving/prompt`)."""

    async def prepare(self, path: str, body: Mapping[str, Any], **read_for: Unpack[ReadFor]) -> Prompt: ...

    def is_continued(self, body: Mapping[str, Any], continued: Mapping[str, Any], text: str) -> bool:
        """Whether engines read the chat `continued` as they do `body`, with `text` after it. For a thread."""
        ...

    def count_tokens(self, text: str) -> int | None:
        """For a thread. None where it is not known."""
        ...

    def observe(self, prompt: Prompt, engine_tokens: int) -> None:
        """What the engine counted for a prompt."""
        ...


class ServedModel(msgspec.Struct, frozen=True):
    """One public model. `aliases` and `loras` are further names for it; a LoRA's name also chooses the adapter.

    fallbacks: models to ask when its engines cannot answer. larger: when a prompt is too long for it. split: models
    that share its requests. keep_alive_comments_s: how often a waiting stream gets a comment.
    """

    name: str
    prompts: Prompts
    aliases: tuple[str, ...] = ()
    loras: tuple[str, ...] = ()
    max_model_tokens: int | None = None
    created: int = 0  # Unix time
    limits: TimeLimits = TimeLimits()
    failover: FailoverRule = FailoverRule()
    fallbacks: tuple[str, ...] = ()
    larger: tuple[str, ...] = ()
    split: tuple[Arm, ...] = ()
    keep_alive_comments_s: float | None = None


class Named(NamedTuple):
    """What a name in a request stands for."""

    model: ServedModel
    lora: str | None


class Models:
    """Replaced whole when the configuration or the fleet changes."""

    def __init__(self, models: Iterable[ServedModel] = (), *, expected: Iterable[str] = ()) -> None:
        """`expected`: names that are configured and whose engines may still be on their way."""
        self._expected = frozenset(expected)
        self._names: dict[str, Named] = {}
        self._only: Named | None = None
        self.replace(models)

    def replace(self, models: Iterable[ServedModel]) -> None:
        names: dict[str, Named] = {}
        models = list(models)
        for model in models:
            names.update({lora: Named(model, lora) for lora in model.loras})
        for model in models:  # after the LoRAs: a public name or alias is never hidden by one
            names.update({name: Named(model, None) for name in (model.name, *model.aliases)})
        self._names = names
        self._only = Named(models[0], None) if len(models) == 1 else None

    def expect(self, names: Iterable[str]) -> None:
        """Names that are configured now."""
        self._expected = frozenset(names)

    def resolve(self, name: object) -> Named:
        """Raises BadRequest for no name where there is a choice, UnknownModel for a name that nobody has.

        NoEngine where the name may yet become known: clients try again after a 503, not after a 404.
        """
        if isinstance(name, str) and (named := self._names.get(name)) is not None:
            return named
        return self._without(name)

    def resolve_for(self, allowed: frozenset[str], name: object) -> Named:
        """The same for a key that may use only these; of any other name it does not tell whether somebody has it.

        Raises Forbidden, too.
        """
        named = self._names.get(name) if isinstance(name, str) else self._without(name)
        if not permits(allowed, name, named):
            raise Forbidden("This key may not use the model.", param="model", code="model_not_allowed")
        return named or self._without(name)

    def find(self, name: str) -> Named | None:
        return self._names.get(name)

    def served(self) -> list[ServedModel]:
        """Each once."""
        return [named.model for name, named in self._names.items() if name == named.model.name]

    def missing(self) -> list[str]:
        """Names that are configured, and that no engine has brought along yet."""
        return sorted(self._expected - self._names.keys())

    def _without(self, name: object) -> Named:
        """What a request stands for whose name of a model, if it has one, is not known."""
        if not self._names or (isinstance(name, str) and name in self._expected):
            raise NoEngine("No engine of the model has joined yet.", retry_after_s=_JOINING_S)
        if name is None:
            if self._only is not None:
                return self._only
            raise BadRequest("You must name a model.", param="model", code="missing_model")
        if not isinstance(name, str):
            raise BadRequest("The model must be a string.", param="model", code="invalid_type")
        raise _unknown(name)

    def listing(self, allowed: frozenset[str] | None = None) -> dict[str, Any]:
        """`GET /v1/models`. `allowed`: what the key may use, None for all."""
        cards = [_card(name, named) for name, named in self._names.items() if permits(allowed, name, named)]
        return {"object": "list", "data": cards}

    def card(self, name: str, allowed: frozenset[str] | None = None) -> dict[str, Any]:
        """`GET /v1/models/{id}`. Raises UnknownModel."""
        if not permits(allowed, name, self._names.get(name)):
            raise _unknown(name)
        return _card(name, self.resolve(name))


def permits(allowed: frozenset[str] | None, name: object, named: Named | None) -> bool:
    """Whether a list of models covers a name.

    An alias is covered by its model. An adapter is a model of its own, and so is a split, whatever it is split into.
    """
    if allowed is None or name in allowed:
        return True
    return named is not None and named.lora is None and named.model.name in allowed


def _unknown(name: str) -> UnknownModel:
    return UnknownModel(f"The model {name[:_SHOWN_CHARS]!r} does not exist.", param="model")


def _card(name: str, named: Named) -> dict[str, Any]:
    model = named.model
    card: dict[str, Any] = {"id": name, "object": "model", "created": model.created, "owned_by": "warmroute"}
    if name != model.name:
        card["root"] = model.name
    if named.lora is not None:
        card["parent"] = model.name
    if model.max_model_tokens is not None:
        card["max_model_len"] = model.max_model_tokens
    return card
