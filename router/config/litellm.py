"""A configuration of LiteLLM's proxy (docs.litellm.ai, "Config.yaml") as one of ours: what has a counterpart, and of
everything else why it has none.

A deployment with an `api_base` is an engine. Deployments of one `model_name` that serve the same model are the engines
of one model; where they serve different ones, the name is a split. Names that lead to the same model are its aliases.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from router.config.litellm_reasons import reason
from router.config.source import Source, Where, dotted, read
from router.config.values import EngineUrl
from router.errors import ConfigError

_COMPATIBLE = frozenset((
    "openai", "text-completion-openai", "custom_openai", "openai_like", "hosted_vllm", "litellm_proxy", "lm_studio",
    "llamafile", "xinference", "nvidia_nim", "docker_model_runner",
))  # fmt: skip
"""Prefixes of `litellm_params.model` that stand for a server with OpenAI's routes."""
_PRICES = {
    "input_cost_per_token": "uncached_input",
    "output_cost_per_token": "output",
    "cache_read_input_token_cost": "cache_read",
    "cache_creation_input_token_cost": "cache_write",
    "output_cost_per_reasoning_token": "reasoning",
    "input_cost_per_audio_token": "media_input",
    "output_cost_per_audio_token": "media_output",
}
_READ = frozenset(("model", "api_base", "base_url", "api_key", "custom_llm_provider", "timeout", "stream_timeout"))
_KEY_CHARS = 32
_MOST_ATTEMPTS = 10


class Remark(NamedTuple):
    """On one thing in the file: what became of it, or why nothing did."""

    place: str
    where: str
    taken: bool
    what: str

    def __str__(self) -> str:
        return f"{self.place}: {self.where}: {'taken' if self.taken else 'not taken'}: {self.what}"


class Imported(NamedTuple):
    """data: ours, as YAML has it. prices: model -> class of tokens -> for a million. remarks: in the file's order."""

    data: dict[str, Any]
    prices: Mapping[str, Mapping[str, Decimal]]
    remarks: list[Remark]


def import_litellm(path: Path, environ: Mapping[str, str]) -> Imported:
    """References to the environment stay references. Raises ConfigError where the file cannot be read."""
    source = read(path, _Unresolved())
    if source.mistakes:
        raise ConfigError(source.mistakes)
    return _Import(source, environ).whole()


class _Unresolved(Mapping[str, str]):
    """An environment whose variables stand for themselves."""

    def __getitem__(self, name: str) -> str:
        return f"${{{name}}}"

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


class _Deployment(NamedTuple):
    where: Where
    name: str  # what clients call it
    served: str  # what the engine calls it
    url: str
    params: Mapping[str, Any]
    info: Mapping[str, Any]


class _Import:
    def __init__(self, source: Source, environ: Mapping[str, str]) -> None:
        self._source = source
        self._environ = environ
        self._remarks: list[tuple[int, Remark]] = []
        self._models: dict[str, dict[str, Any]] = {}  # ours, by public name
        self._engines: list[dict[str, Any]] = []
        self._public: dict[str, str] = {}  # any name of theirs -> the public name it leads to
        self._prices: dict[str, dict[str, Decimal]] = {}
        self._general: dict[str, dict[str, Any]] = {"timeouts": {}, "failover": {}, "redis": {}, "admin": {}}

    def whole(self) -> Imported:
        self._take_models()
        settings: Mapping[str, Callable[[Where, Any], None]] = {
            "router_settings": self._take_router_setting,
            "litellm_settings": self._take_litellm_setting,
            "general_settings": self._take_general_setting,
        }
        for section, value in self._source.data.items():
            if section in settings:
                for name, setting in _mapping(value).items():
                    settings[section]((section, name), setting)
            elif section != "model_list":
                self._leave((section,), reason(section))
        self._take_redis()
        models = {name: {key: value for key, value in model.items() if value} for name, model in self._models.items()}
        data = {"models": models, "engines": self._engines, **self._general}
        remarks = [remark for _, remark in sorted(self._remarks, key=lambda numbered: numbered[0])]
        return Imported({key: value for key, value in data.items() if value}, self._prices, remarks)

    # --- remarks

    def _take(self, where: Where, what: str) -> None:
        self._remark(where, what, taken=True)

    def _leave(self, where: Where, why: str) -> None:
        self._remark(where, why, taken=False)

    def _remark(self, where: Where, what: str, *, taken: bool) -> None:
        place = self._source.place(where)
        self._remarks.append((place.line, Remark(str(place), dotted(where), taken, what)))

    # --- model_list

    def _take_models(self) -> None:
        listed = self._source.data.get("model_list") or []
        found = [self._deployment(("model_list", at), _mapping(entry)) for at, entry in enumerate(listed)]
        deployments = self._one_an_address(deployment for deployment in found if deployment is not None)
        leads_to: dict[str, dict[str, float]] = {}  # name -> what is served under it -> weight
        for one in deployments:
            arms = leads_to.setdefault(one.name, {})
            arms[one.served] = arms.get(one.served, 0) + _weight(one.params)
        names = {name: next(iter(arms)) for name, arms in leads_to.items() if len(arms) == 1}
        public = {one.served: self._public_name(one.served, names, taken=leads_to) for one in deployments}
        for name, arms in leads_to.items():
            if name in names:
                self._public[name] = public[names[name]]
            else:
                self._public[name] = name
                self._model(name)["split"] = {public[served]: weight for served, weight in arms.items()}
        for one in deployments:
            self._take_deployment(one, public[one.served])

    @staticmethod
    def _public_name(served: str, names: Mapping[str, str], *, taken: Iterable[str]) -> str:
        """The first name that leads to what is served and nothing else; else the engine's own."""
        own = next((name for name, leads_to in names.items() if leads_to == served), None)
        return own or (f"{served}-base" if served in taken else served)

    def _model(self, name: str) -> dict[str, Any]:
        empty: dict[str, Any] = {"aliases": [], "split": {}, "fallbacks": [], "context_window_fallbacks": []}
        return self._models.setdefault(name, {**empty, "timeouts": {}})

    def _deployment(self, where: Where, entry: Mapping[str, Any]) -> _Deployment | None:
        """None for one that cannot be an engine of ours, which is said."""
        params, name = _mapping(entry.get("litellm_params")), entry.get("model_name")
        called = params.get("model")
        if not isinstance(name, str) or not isinstance(called, str):
            self._leave(where, "has no model_name, or no litellm_params.model")
            return None
        if "*" in name:
            self._leave(where, f"{name!r} is a wildcard: models are named one by one, or as engines list them")
            return None
        provider, slash, served = called.partition("/")
        given = params.get("custom_llm_provider")
        if given is not None or not slash:
            provider, served = str(given or "openai"), called
        base = params.get("api_base") or params.get("base_url")
        if base is None:
            self._leave(where, f"{called!r} is an outside provider's (no api_base), and none is served yet")
        elif provider not in _COMPATIBLE:
            self._leave(where, f"{provider!r} is not served yet; if it has OpenAI's routes, write openai/{served}")
        elif (url := self._url(where, str(base))) is not None:
            return _Deployment(where, name, served, url, params, _mapping(entry.get("model_info")))
        return None

    def _url(self, where: Where, base: str) -> str | None:
        """Without /v1. A reference stays one if what it stands for is an engine's url."""
        reference = re.fullmatch(r"\$\{(\w+)\}", base)
        value = self._environ.get(reference[1]) if reference else base
        if value is None:
            self._take((*where, "litellm_params", "api_base"), f"as {base}, which must end after the port (no /v1)")
            return base
        url = value.rstrip("/").removesuffix("/v1")
        try:
            TypeAdapter(EngineUrl).validate_python(url)
        except ValidationError as error:
            what = error.errors()[0]["msg"].removeprefix("Value error, ")
            self._leave(where, f"its api_base {what}")
            return None
        return base if url == value else url

    def _one_an_address(self, deployments: Iterable[_Deployment]) -> list[_Deployment]:
        served: dict[str, str] = {}
        kept = []
        for one in deployments:
            first = served.setdefault(one.url, one.served)
            if first == one.served:
                kept.append(one)
            else:
                what = f"{one.url} is the engine of {first!r}; adapters that it lists are found, by the engine's names"
                self._leave(one.where, what)
        return kept

    def _take_deployment(self, one: _Deployment, public: str) -> None:
        model = self._model(public)
        if self._public[one.name] == public and one.name not in (public, *model["aliases"]):
            model["aliases"].append(one.name)
        if all(engine["url"] != one.url for engine in self._engines):
            self._engines.append(_engine(one, public))
        called = f" ({one.served!r} to the engine)" if one.served != public else ""
        self._take(one.where, f"{one.url} serves {public!r}{called}" + (", as " + one.name) * (one.name != public))
        self._take_time((*one.where, "litellm_params", "timeout"), one.params, model["timeouts"], "total_s", public)
        self._take_time(
            (*one.where, "litellm_params", "stream_timeout"), one.params, model["timeouts"], "first_byte_s", public
        )
        for part, values in (("litellm_params", one.params), ("model_info", one.info)):
            for name, value in values.items():
                if name in _PRICES:
                    self._take_price((*one.where, part, name), public, _PRICES[name], value)
                elif name == "weight" and self._public[one.name] != public and one.name not in model["aliases"]:
                    self._take((*one.where, part, name), f"as its weight in the split {one.name!r}")
                elif name not in _READ and name != "id":
                    self._leave((*one.where, part, name), reason(name))

    def _take_time(
        self, where: Where, given: Mapping[str, Any], times: dict[str, Any], ours: str, model: str = ""
    ) -> None:
        """The longest of those that are given for a model."""
        seconds = given.get(str(where[-1]))
        if seconds is None:
            return
        if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or seconds <= 0:
            self._leave(where, "is no time in seconds")
            return
        times[ours] = max(seconds, times.get(ours, 0))
        self._take(where, f"as {dotted(('models', model)) + '.' if model else ''}timeouts.{ours}")

    def _take_price(self, where: Where, model: str, kind: str, value: object) -> None:
        try:
            price = Decimal(str(value)) * 10**6
        except InvalidOperation:
            price = Decimal(-1)
        if not price.is_finite() or price < 0 or price != round(price, 6):
            self._leave(where, "is no price: a million tokens must cost a decimal with at most six places")
            return
        known = self._prices.setdefault(model, {}).setdefault(kind, price)
        if known == price:
            self._take(where, f"as a price of {model!r}: {kind} {_plain(price)} for a million (--apply)")
        else:
            self._leave(where, f"{model!r} has {_plain(known)} for a million of {kind} already")

    # --- settings

    def _take_router_setting(self, where: Where, value: Any) -> None:
        match where[-1]:
            case "model_group_alias":
                for alias, target in _mapping(value).items():
                    self._take_alias((*where, alias), alias, target)
            case "timeout":
                self._take_time(where, {"timeout": value}, self._general["timeouts"], "total_s")
            case "stream_timeout":
                self._take_time(where, {"stream_timeout": value}, self._general["timeouts"], "first_byte_s")
            case "redis_url" | "redis_host" | "redis_port" | "redis_password":
                self._take(where, "as part of redis.url")
            case _:
                self._take_litellm_setting(where, value)

    def _take_litellm_setting(self, where: Where, value: Any) -> None:
        match where[-1]:
            case "fallbacks" | "context_window_fallbacks":
                for at, rule in enumerate(value or []):
                    for name, targets in _mapping(rule).items():
                        self._take_fallbacks((*where, at, name), str(where[-1]), name, targets)
            case "num_retries" if isinstance(value, int):
                self._general["failover"]["attempts"] = min(value + 1, _MOST_ATTEMPTS)
                self._take(where, f"as failover.attempts: {min(value + 1, _MOST_ATTEMPTS)}, the first included")
            case "request_timeout":
                self._take_time(where, {"request_timeout": value}, self._general["timeouts"], "total_s")
            case name:
                self._leave(where, reason(str(name)))

    def _take_general_setting(self, where: Where, value: Any) -> None:
        if where[-1] != "master_key":
            self._leave(where, reason(str(where[-1])))
            return
        reference = re.fullmatch(r"\$\{(\w+)\}", str(value))
        known = self._environ.get(reference[1]) if reference else str(value)
        if known is not None and len(known) < _KEY_CHARS:
            self._leave(
                where, f"admin.auth.bootstrap_key needs {_KEY_CHARS} characters; make one: openssl rand -hex 32"
            )
            return
        self._general["admin"]["auth"] = {"bootstrap_key": value}
        self._take(where, "as admin.auth.bootstrap_key, which opens the admin API and runs no completions")

    def _take_alias(self, where: Where, alias: str, target: Any) -> None:
        model = target.get("model") if isinstance(target, Mapping) else target
        public = self._public.get(str(model))
        if public is None:
            self._leave(where, f"{model!r} is not served")
        elif alias in self._public or alias in self._models:
            self._leave(where, f"{alias!r} is a model of its own")
        else:
            self._public[alias] = public
            self._model(public)["aliases"].append(alias)
            self._take(where, f"as an alias of {public!r}")

    def _take_fallbacks(self, where: Where, kind: str, name: str, targets: Any) -> None:
        public = self._public.get(name)
        if public is None:
            self._leave(where, f"{name!r} is not served")
            return
        for target in targets if isinstance(targets, list) else [targets]:
            found = self._public.get(target) if isinstance(target, str) else None
            if found is None:
                self._leave(where, f"{target!r} is not served")
            elif found != public:
                ours = self._model(public)[kind]
                ours += [found] if found not in ours else []
                self._take(where, f"as {dotted(('models', public, kind))}: {found}")

    def _take_redis(self) -> None:
        given = _mapping(self._source.data.get("router_settings"))
        host, password = given.get("redis_host"), given.get("redis_password")
        user = f":{password}@" if password else ""
        url = given.get("redis_url") or (f"redis://{user}{host}:{given.get('redis_port') or 6379}" if host else None)
        if url:
            self._general["redis"]["url"] = url


def _engine(one: _Deployment, public: str) -> dict[str, Any]:
    engine = {"url": one.url, "model": public}
    if one.served != public:
        engine["served"] = one.served
    if one.params.get("api_key"):
        engine["api_key"] = str(one.params["api_key"])
    return engine


def _weight(params: Mapping[str, Any]) -> float:
    weight = params.get("weight")
    return weight if isinstance(weight, (int, float)) and not isinstance(weight, bool) and weight > 0 else 1


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _plain(price: Decimal) -> str:
    return f"{price.normalize():f}"
