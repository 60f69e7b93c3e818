"""The configuration: one YAML file, read once, frozen, and checked as a whole before anything starts.

Every mistake is reported at once, each as "file:line: path.to.key: what is wrong (and what to do)". This is the only
module that reads the environment. Three variables override the file, for containers:

    WARMROUTE_LISTEN_HOST   listen.host
    WARMROUTE_LISTEN_PORT   listen.port
    WARMROUTE_STATE_DIR     state_dir

Kubernetes sets NAME_PORT=tcp://… in every pod for a Service called NAME; hence no WARMROUTE_PORT. A flag of the command
line beats the environment, which beats the file, which beats the defaults.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from router.config.accounts import AdminAuth, Auth, Isolation, Ledger, Redis, Store
from router.config.checks import Check, Mistake, contradictions
from router.config.engines import Engine, EngineRates, EngineTls, Events
from router.config.listen import Admin, Cors, Drain, Listen, ListenTls, asks_for_certificates, is_loopback
from router.config.litellm import Imported, import_litellm
from router.config.mistakes import blame_invalid, without
from router.config.models import Failover, Model, ModelTimeouts, Timeouts
from router.config.placing import Index, PolicyChoice, PromptReading, WaitingRoom
from router.config.section import Section
from router.config.source import Source, Where, read
from router.config.values import Text
from router.errors import ConfigError

__all__ = [
    "Admin", "AdminAuth", "Auth", "Check", "Config", "Cors", "Drain", "Engine", "EngineRates", "EngineTls", "Events",
    "Failover", "Index", "Isolation", "Ledger", "Listen", "ListenTls", "Mistake", "Model", "ModelTimeouts",
    "PolicyChoice", "PromptReading", "Redis", "Section", "Store", "Timeouts", "WaitingRoom", "from_flags",
    "from_litellm", "json_schema", "load",
]  # fmt: skip

STATE_DIR = Path("~/.local/state/warmroute")

ENVIRONMENT: Mapping[str, Where] = {
    "WARMROUTE_LISTEN_HOST": ("listen", "host"),
    "WARMROUTE_LISTEN_PORT": ("listen", "port"),
    "WARMROUTE_STATE_DIR": ("state_dir",),
}

FLAGS: Mapping[str, Where] = {
    "host": ("listen", "host"),
    "port": ("listen", "port"),
    "admin_port": ("admin", "port"),
    "tokenizer": ("models", "*", "tokenizer"),
    "policy": ("policy", "name"),
    "state_dir": ("state_dir",),
}
"""What `load` and `from_flags` take as `flags`, and the key each one sets."""

_NO_ENGINE = "needs at least one engine (engines: [{url: http://HOST:PORT}])"


def _state_dir(value: Any) -> Any:
    return STATE_DIR if value is None else value


def _at_least_one(engines: tuple[Engine, ...]) -> tuple[Engine, ...]:
    if not engines:
        raise ValueError(_NO_ENGINE)
    return engines


class Config(Section):
    """warmroute.yaml"""

    listen: Listen = Listen()
    """The inference API."""
    admin: Admin = Admin()
    """The admin API."""
    state_dir: Annotated[Path, BeforeValidator(_state_dir, json_schema_input_type=str | None)] = STATE_DIR
    """Where the index file, secrets and the default database are kept; made with mode 0700."""
    models: dict[Text, Model] = Field(default_factory=dict)
    """Public model names; "*" holds the settings of every model not named here."""
    engines: Annotated[tuple[Engine, ...], AfterValidator(_at_least_one), Field(json_schema_extra={"minItems": 1})]
    """The engines to place requests on."""
    policy: PolicyChoice = PolicyChoice()
    """The placement policy."""
    waiting_room: WaitingRoom = WaitingRoom()
    """The waiting room."""
    index: Index = Index()
    """The block index."""
    prompt: PromptReading = PromptReading()
    """Prompt reading."""
    timeouts: Timeouts = Timeouts()
    """Timeouts towards engines."""
    failover: Failover = Failover()
    """What is done about engines that fail."""
    store: Store = Store()
    """The database."""
    redis: Redis = Redis()
    """What several gateways share."""
    auth: Auth = Auth()
    """Who may use the inference API."""
    isolation: Isolation = Isolation()
    """How tenants' caches are kept apart."""
    ledger: Ledger = Ledger()
    """What requests cost."""

    def model(self, name: str) -> Model:
        """The settings of a public model name (no alias)."""
        return self.models.get(name) or self.models.get("*") or Model()

    @property
    def aliases(self) -> dict[str, str]:
        """alias -> public model name."""
        return {alias: name for name, model in self.models.items() for alias in model.aliases}

    @property
    def notes(self) -> tuple[str, ...]:
        """What is allowed but should be known."""
        notes = []
        for engine in self.engines:
            if engine.client_tls is not None and not engine.client_tls.verify:
                name = engine.id or engine.address
                notes.append(
                    f"INSECURE: {name} has tls.verify: false, so whoever stands between can read all it is sent"
                )
        if not is_loopback(self.listen.host) and not asks_for_certificates(self.listen.tls):
            if self.auth.mode == "open":
                notes.append(f"listen.host {self.listen.host} is not loopback: whoever reaches it may use the engines")
            elif self.auth.mode == "auto":
                notes.append(
                    f"listen.host {self.listen.host} is not loopback: while there are no tenants, nobody is served"
                )
        free = [engine.id or engine.address for engine in self.engines if engine.price_per_hour is None]
        if self.policy.weights.get("price") and free:
            notes.append(f"policy.weights.price is set, and engines without price_per_hour are free: {', '.join(free)}")
        return tuple(notes)

    def make_state_dir(self) -> Path:
        """Creates the state directory if it isn't there. Raises ConfigError where that can't be done."""
        try:
            self.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            raise ConfigError([f"state_dir: {str(self.state_dir)!r} cannot be made: {exc.strerror}"]) from exc
        return self.state_dir

    @staticmethod
    def prepare_process() -> None:
        """Tokenizers work in one thread of ours: theirs would take the cores that relay and engines need."""
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def load(
    path: Path | str,
    *,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    check: Check | None = None,
) -> Config:
    """Reads the file. Raises ConfigError with every mistake.

    flags: values of FLAGS from the command line, None meaning "not given". check: a further check of what is valid in
    itself, such as whether its plugins are installed.
    """
    environment = os.environ if environ is None else environ
    source = read(Path(path), environment)
    return _validated(source, flags or {}, environment, base=Path(path).absolute().parent, check=check)


def from_flags(
    engines: Sequence[str],
    *,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    check: Check | None = None,
) -> Config:
    """A configuration without a file: the engines' URLs and the FLAGS. Raises ConfigError with every mistake."""
    source = Source("command line")
    source.put(("engines",), [{"url": url} for url in engines], origin="--engine")
    environment = os.environ if environ is None else environ
    return _validated(source, flags or {}, environment, base=Path.cwd(), check=check)


def from_litellm(path: Path, *, environ: Mapping[str, str] | None = None) -> Imported:
    """A LiteLLM proxy's file as one of ours, to be written down. Raises ConfigError where it cannot be read."""
    return import_litellm(path, os.environ if environ is None else environ)


def json_schema() -> dict[str, Any]:
    """JSON Schema of the file, for editors (2020-12)."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}
    return cast(dict[str, Any], _in_one_line(schema))


def _in_one_line(schema: Any) -> Any:
    """Descriptions as editors show them: docstrings are wrapped for the reader of this file."""
    if isinstance(schema, dict):
        return {key: _in_one_line(value) for key, value in schema.items()}
    if isinstance(schema, list):
        return [_in_one_line(value) for value in schema]
    return " ".join(schema.split("\n")) if isinstance(schema, str) else schema


def _validated(
    source: Source, flags: Mapping[str, Any], environ: Mapping[str, str], *, base: Path, check: Check | None
) -> Config:
    if () in source.blamed:  # no file to speak of: nothing in it can be right or wrong
        raise ConfigError(source.mistakes)
    for name, where in ENVIRONMENT.items():
        if environ.get(name):
            source.put(where, environ[name], origin=f"environment {name}")
    for flag, value in flags.items():
        if value is not None:
            source.put(FLAGS[flag], value, origin=f"--{flag.replace('_', '-')}")
    config = _valid_part(source, base=base)
    if config:
        for where, what in (*contradictions(config), *(check(config) if check else ())):
            source.blame(where, what)
    if not config or source.mistakes:
        raise ConfigError(source.mistakes)
    return config.model_copy(update={"state_dir": base / config.state_dir.expanduser()})


def _valid_part(source: Source, *, base: Path) -> Config | None:
    """Blames what is invalid. What remains without it, if that makes a whole: so that the later checks see it too."""
    try:
        return Config.model_validate(source.data, context={"base": base})
    except ValidationError as exc:
        for error in exc.errors(include_url=False, include_input=False):
            blame_invalid(source, error, root=Config)
    try:
        return Config.model_validate(without(source.data, source.blamed), context={"base": base})
    except ValidationError:
        return None
