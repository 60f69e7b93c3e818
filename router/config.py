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

import ipaddress
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast
from urllib.parse import urlsplit

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Discriminator,
    Field,
    SecretStr,
    Tag,
    ValidationError,
    model_validator,
)

from router.config_mistakes import blame_invalid, without
from router.config_source import Source, Where, read
from router.config_values import (
    GIB,
    KIB,
    MIB,
    RATE_PROFILES,
    EngineUrl,
    EventEndpoint,
    File,
    ForwardedHeader,
    Identifier,
    Milliseconds,
    Network,
    Port,
    RateProfile,
    Seconds,
    ServerName,
    Size,
    Text,
    Tokenizer,
    Tokens,
    Weight,
)
from router.core import ClientTls, EventSource, Instance, Rates
from router.errors import ConfigError
from router.tls import BadTlsFile, ServerTls, check_client, check_server

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

Mistake = tuple[Where, str]
Check = Callable[["Config"], Iterable[Mistake]]

_NO_ENGINE = "needs at least one engine (engines: [{url: http://HOST:PORT}])"


def _state_dir(value: Any) -> Any:
    return STATE_DIR if value is None else value


def _at_least_one(engines: tuple[Engine, ...]) -> tuple[Engine, ...]:
    if not engines:
        raise ValueError(_NO_ENGINE)
    return engines


def _rates(value: Any) -> Any:
    return {"profile": value} if isinstance(value, str) else value


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


class Section(BaseModel):
    """A key that is there but empty means "the defaults", as people leave it when all below is commented out."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _empty_is_default(cls, value: Any) -> Any:
        return {} if value is None else value


# ---------------------------------------------------------------------------------------------------------------------
# The sections


class Cors(Section):
    origins: tuple[Text, ...] = ()
    """Browser origins that may call the API, e.g. https://chat.example.com; "*" for any. None by default."""


class Drain(Section):
    """What SIGTERM begins. /readyz says 503 at once, so that balancers send their requests elsewhere."""

    accept_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 5.0
    """So long, seconds, new connections and requests are still taken: until every balancer has noticed."""
    finish_s: Seconds = 120.0
    """So long after the signal, seconds, running requests go on; those that are left end with an error. Whoever sent
    the signal must wait longer than this before it kills (Kubernetes: terminationGracePeriodSeconds, by default 30)."""


class ListenTls(Section):
    """TLS 1.2 or newer on a port of ours. A certificate that is written anew is taken up within seconds."""

    cert: File
    """The certificate with its chain, PEM. An ECDSA key signs ten times as fast as an RSA one, in every handshake."""
    key: File | None = None
    """Its private key, PEM, without a passphrase; by default it is in the same file."""
    client_ca: File | None = None
    """Clients must show a certificate that a CA in this file, PEM, has signed. By default none is asked for."""

    def settings(self) -> ServerTls:
        return ServerTls(str(self.cert), _text(self.key), _text(self.client_ca))


class Listen(Section):
    """The inference API: what clients take as base_url."""

    host: Text = "127.0.0.1"
    """Address to listen on. Beyond loopback the engines are open to whoever reaches it: there are no client keys."""
    port: Port = 4000
    """TCP port; 0 takes a free one."""
    tls: ListenTls | None = None
    """Makes it https://. Plain http by default."""
    cors: Cors = Cors()
    """Calls from browsers."""
    access_log: bool = False
    """One line a request on standard error, with the client's address. Never the prompt."""
    trusted_proxies: tuple[Network, ...] = ()
    """Addresses or networks of the load balancers before us, e.g. 10.0.0.0/8. What they say of a client in
    X-Forwarded-For and X-Forwarded-Proto goes to the access log; from anybody else it is ignored."""
    proxy_protocol: bool = False
    """Connections of trusted_proxies begin with the PROXY protocol (version 1 or 2), those of others do not."""
    forward_headers: tuple[ForwardedHeader, ...] = ()
    """Headers of clients that engines get as they came, besides traceparent and tracestate; e.g. baggage."""
    max_body_bytes: Size = ByteSize(64 * MIB)
    """A larger request body is refused with 413, as it came and after decompression."""
    max_head_bytes: Size = ByteSize(64 * KIB)
    """A request with a larger head is refused with 431."""
    max_headers: Annotated[int, Field(ge=1, le=10_000)] = 100
    """A request with more headers is refused with 431."""
    head_s: Seconds = 30.0
    """A request head that has not come whole by then is refused with 408, seconds from its first byte."""
    body_idle_s: Seconds = 30.0
    """A request body of which nothing has come for so long is refused with 408, seconds."""
    body_bytes_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1024.0
    """So many bytes of body prolong its time by a second: it may take that and body_idle_s, else 408."""
    keep_alive_s: Seconds = 75.0
    """How long an idle client connection is kept open, seconds."""
    stalled_reader_s: Seconds = 60.0
    """A client that takes nothing of its answer for so long is dropped and its engine freed, seconds."""
    drain: Drain = Drain()
    """How the gateway ends."""
    receipts: bool = False
    """Adds x-warmroute-instance, the name of the engine that answered. It shows how requests are placed, so leave it
    off where clients must not learn of each other. The token counts are there in any case:
    x-warmroute-predicted-tokens, and x-warmroute-cached-tokens on an answer that is no stream if the engine told it."""


class Admin(Section):
    """Metrics, readiness, explain and the live view."""

    host: Text = "127.0.0.1"
    """Address to listen on. There is no login: keep it on loopback or inside the cluster."""
    port: Port = 4001
    """TCP port; 0 takes a free one."""
    tls: ListenTls | None = None
    """Makes it https://. With client_ca it has a login of a kind."""
    enabled: bool = True
    """False: no admin API; the inference port is all there is."""


class ModelTimeouts(Section):
    """Seconds; see timeouts."""

    first_byte_s: Seconds | None = None
    """To the first token of a stream, or the first byte of another answer."""
    between_s: Seconds | None = None
    """From one piece of an answer to the next."""
    total_s: Seconds | None = None
    """For a request in all."""


class Failover(Section):
    """What is done about an engine that fails before the first byte of its answer. After it nothing is tried again."""

    attempts: Annotated[int, Field(ge=1, le=10)] = 2
    """So many engines are tried for a request, the first included; 1: only that."""
    retry_on: tuple[Literal["refused", "busy", "unable", "died", "reset", "failed", "silent"], ...] = (
        "refused", "busy", "unable", "died",
    )  # fmt: skip
    """After what another engine is tried. refused: no connection. busy: 429 or 503. unable: 401, 403 or 404. died: no
    answer, and nobody is there any more. The others may make two engines compute one answer: reset, a connection that
    broke before the answer; failed, another 5xx; silent, no first token within move_on_s."""
    within_s: Seconds = 30.0
    """No attempt begins later than this after the request came."""
    wait_s: Annotated[float, Field(ge=0, le=600)] = 0.0
    """Where there is no other engine, a request waits so long for one that was busy or failed to be asked again, and
    not before its Retry-After; by default the client is told to."""
    move_on_s: Seconds | None = None
    """An engine without a first token by then is given up if there is another (needs silent in retry_on); by default it
    is waited for as long as timeouts.first_byte_s says."""
    share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Of all requests, so many may be tried again (and ten at once), so that retries don't finish an overloaded fleet.
    Only of the general section, not of a model's."""


class Model(Section):
    """How prompts of one public model name are read, and how its requests are placed."""

    aliases: tuple[Text, ...] = ()
    """Further names clients may use for it."""
    tokenizer: Tokenizer | None = None
    """A directory with the model's tokenizer.json (relative to this file); tiktoken:NAME@FILE; demo (the one we ship);
    engine (ask the engine to tokenize); none (place by load alone). By default the model's own directory if the engine
    tells one that can be read here, else engine."""
    chat_template: File | None = None
    """A Jinja file, where the engine runs with --chat-template. By default the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """What the engine runs with as --default-chat-template-kwargs."""
    policy: Text | None = None
    """The policy for this model; by default policy.name."""
    parity: Literal["enforce", "warn", "off"] = "enforce"
    """Our token ids are compared with the engine's on a set of probes at start. enforce: where they differ, the engine
    tokenizes. warn: say so, and go on with ours. off: don't compare."""
    fallbacks: tuple[Text, ...] = ()
    """Models to ask, in this order, when no engine of this one can answer."""
    split: dict[Text, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    """Models that share the requests for this name, with their weights, e.g. {base: 95, candidate: 5}. A conversation
    stays with one of them. Such a name has no engines of its own."""
    context_window_fallbacks: tuple[Text, ...] = ()
    """Models to ask when a prompt is too long for this one."""
    timeouts: ModelTimeouts = ModelTimeouts()
    """Time limits of this model; what is not given is as in timeouts."""
    failover: Failover | None = None
    """What is done about failures of this model's engines; by default as in failover."""
    keep_alive_comments_s: Seconds | None = None
    """A stream in which nothing has come for so long gets a comment, and again after each such time until its answer
    begins, for load balancers that cut idle connections (15 suits most). What fails after the first comment is said in
    the stream, not by a status. None by default: some clients that read streams by hand stumble over comments."""
    tokenize: Literal["auto", "always"] = "auto"
    """auto: text never seen before, which no engine can hold, is counted by estimate and tokenized off the path; short
    text at once while the gateway has little to do. always: every prompt is tokenized before it is placed, which costs
    about 2 ms per 1,000 new tokens."""


class Events(Section):
    """Where one rank of an engine publishes its KV-cache events."""

    rank: Annotated[int, Field(ge=0)] = 0
    """The data-parallel rank."""
    endpoint: EventEndpoint
    """tcp://HOST:PORT of the publisher, as seen from here: no wildcard."""
    replay: EventEndpoint | None = None
    """tcp://HOST:PORT that replays missed batches (replay_endpoint in the engine's --kv-events-config)."""
    topic: str = ""
    """The topic the engine publishes under; empty receives all."""


class EngineRates(Section):
    """How long an engine takes, as far as known; the rest comes from the profile and is corrected while running.
    prefill ms = c1*n + c2*n*(L - n/2) for n uncached of L tokens; a decode step = c0 + c3*context + c4*sequences."""

    profile: RateProfile = "llama-3.1-8b-h100"
    """Where the numbers not given here come from."""
    c0_ms: Milliseconds | None = None
    """A step's fixed time, ms."""
    c1_ms: Milliseconds | None = None
    """Prefill, ms per uncached token."""
    n0_tokens: Annotated[int, Field(ge=0)] | None = None
    """Tokens of a step that c0 already pays for."""
    c2_ms: Milliseconds | None = None
    """Prefill, ms per uncached token and token of context."""
    c3_ms: Milliseconds | None = None
    """Decode, ms per token of context in the batch."""
    c4_ms: Milliseconds | None = None
    """Decode, ms per sequence in the batch."""
    host_ms: Milliseconds | None = None
    """Loading from host memory, ms per token."""
    disk_ms: Milliseconds | None = None
    """Loading from disk, ms per token."""
    remote_ms: Milliseconds | None = None
    """Loading from a remote store, ms per token."""

    def rates(self) -> Rates:
        return msgspec.structs.replace(
            RATE_PROFILES[self.profile], **self.model_dump(exclude={"profile"}, exclude_none=True)
        )


class EngineTls(Section):
    """How an https:// engine is trusted, and what it is shown. Files that are written anew are taken up within
    seconds, for new connections."""

    ca: File | None = None
    """The CAs to trust, PEM, instead of the system's."""
    cert: File | None = None
    """Our certificate with its chain, PEM, for an engine that asks for one."""
    key: File | None = None
    """Its private key, PEM, without a passphrase; by default it is in the same file."""
    server_name: ServerName | None = None
    """The name that the engine's certificate must carry; also sent as SNI. By default the url's host; the name, not
    the address, for dns+https."""
    verify: bool = True
    """false: any certificate will do, so that whoever stands between can read prompts and keys. For trials only."""


def _events_form(value: Any) -> str:
    return "sources" if isinstance(value, (list, tuple)) else "word"


class Engine(Section):
    """One engine, or all engines behind a headless service's name."""

    url: EngineUrl
    """http://HOST:PORT of the engine. dns+http://NAME:PORT stands for every address NAME resolves to, polled."""
    kind: Text = "auto"
    """auto asks the engine; else the name of an adapter: vllm, sglang, openai, or module:attr."""
    id: Identifier | None = None
    """Name in metrics and receipts; by default HOST:PORT. A prefix for dns+http."""
    model: Text | None = None
    """The public model name it serves; by default the first one the engine lists."""
    served: Text | None = None
    """The engine's own name of that model, where it differs."""
    api_key: Annotated[SecretStr, Field(min_length=1)] | None = None
    """The engine's own key (vLLM and SGLang: --api-key). Refer to the environment: ${ENGINE_KEY}."""
    tls: EngineTls | None = None
    """Certificates, where the url is https://. By default the system's CAs decide."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Free words for policies and metrics, e.g. zone: a."""
    events: Annotated[
        Annotated[Literal["auto", "off"], Tag("word")] | Annotated[tuple[Events, ...], Tag("sources")],
        Discriminator(_events_form),
    ] = "auto"
    """auto asks the engine where it publishes; off works from what was sent to it; or one entry a rank, for engines
    that don't tell (vLLM before 0.31, SGLang before 0.5.15)."""
    block_size: Tokens | None = None
    """Tokens in a KV block, only for engines that don't tell."""
    capacity_tokens: Tokens | None = None
    """Tokens the KV cache of one rank holds, only for engines that don't tell."""
    hit_alignment_tokens: Tokens | None = None
    """The engine reuses whole units of so many tokens only (hybrid models); by default what it tells."""
    rates: Annotated[EngineRates | None, BeforeValidator(_rates, json_schema_input_type=str | EngineRates | None)] = (
        None
    )
    """How fast it is: the name of a profile, or numbers. By default llama-3.1-8b-h100, corrected while running."""
    price_per_hour: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """What an hour of it costs, all its ranks together, in the currency of policy.weights.price; of dns+http, each."""

    @property
    def discovered(self) -> bool:
        """Whether the url is a DNS name that stands for several engines."""
        return self.url.startswith("dns+")

    @property
    def address(self) -> str:
        return self.url.partition("://")[2]

    @property
    def client_tls(self) -> ClientTls | None:
        """None for plain http. The addresses behind a name share the certificate of the name."""
        parts = urlsplit(self.url)
        if not parts.scheme.endswith("https"):
            return None
        tls = self.tls or EngineTls()
        name = tls.server_name or (parts.hostname if self.discovered else None)
        return ClientTls(_text(tls.ca), _text(tls.cert), _text(tls.key), name, tls.verify)

    def instance(self, *, engine: str, model: str, url: str | None = None) -> Instance:
        """The core noun, once the adapter's name and the public model are known. url: one address of a DNS name."""
        address = (url or self.url).partition("://")[2]
        name = f"{self.id}-{address}" if self.id and self.discovered else self.id or address
        return Instance(
            id=name,
            url=url or self.url,
            engine=engine,
            model=model,
            served=self.served,
            api_key=self.api_key.get_secret_value() if self.api_key else None,
            labels=self.labels,
            events=self._event_sources(),
            block_size=self.block_size,
            capacity_tokens=self.capacity_tokens,
            hit_alignment_tokens=self.hit_alignment_tokens,
            price_per_hour=self.price_per_hour,
            tls=self.client_tls,
        )

    def _event_sources(self) -> tuple[EventSource, ...] | None:
        if isinstance(self.events, str):
            return None if self.events == "auto" else ()
        return tuple(EventSource(e.rank, e.endpoint, e.replay, e.topic) for e in self.events)


class PolicyChoice(Section):
    """Who gets a request."""

    name: Text = "kv_aware"
    """The name of an installed policy, or module:attr."""
    weights: dict[str, Weight] = Field(default_factory=dict)
    """The policy's weights by name, 0 or more; what is not given keeps the policy's own."""
    ttft_slo_s: Seconds | None = None
    """Objective for the time to first token, seconds: engines predicted to meet it come before all others, for
    policies that look at it (kv_aware does). None by default."""
    ttft_slo_per_1k_tokens_ms: Milliseconds = 0.0
    """What 1,000 tokens of prompt add to ttft_slo_s, ms. SMetric takes 1 s and 62.5 ms."""
    shadow: tuple[Text, ...] = ()
    """Policies that are scored on the same decisions and never act, with their own weights: how often they would have
    chosen otherwise, and what the choice cost in their eyes, is in the metrics (warmroute_shadow_*)."""


class WaitingRoom(Section):
    """Where requests wait until an engine has room for them, in the order that serves all of them soonest."""

    enabled: bool = True
    """false: every request goes to an engine as it arrives, and waits there. The weights of kv_aware are chosen for the
    room; without it neighbours: 0.5 serves better under heavy load."""
    free_tokens: Tokens = 2_048
    """An engine takes more while fewer uncached prompt tokens of ours are on their way to their first token there."""
    head_start_max_s: Seconds = 40.0
    """Short prompts go before long ones, but nothing that arrives later than this overtakes a request; under heavy
    overload up to 300 s."""
    wait_s: Seconds = 600.0
    """A request that is not placed by then is refused; one that could not be, at once, with Retry-After."""
    max_requests: Annotated[int, Field(ge=1, le=10_000_000)] = 10_000
    """So many may wait; further ones are refused."""
    max_bytes: Size = ByteSize(GIB)
    """So many bytes of bodies may wait; further ones are refused."""


class Index(Section):
    """The memory of who holds what."""

    max_bytes: Size = ByteSize(GIB)
    """Hard bound of its memory; beyond it the oldest entries go."""
    save_every_s: Seconds = 60.0
    """How often it is written to state_dir, so that a restart starts warm."""


class PromptReading(Section):
    """Turning prompts into block keys."""

    memo_bytes: Size = ByteSize(256 * MIB)
    """Memory for token ids of text seen before."""
    wait_ms: Milliseconds = 300.0
    """How long a request waits for the tokens of text that an engine may hold, from our thread or the engine, before
    it is placed without them."""


class Timeouts(Section):
    """Towards engines, seconds."""

    connect_s: Seconds = 5.0
    """To open a connection."""
    first_byte_s: Seconds = 600.0
    """To the first token of a stream, or the first byte of another answer: queueing in the engine and prefill of a long
    prompt are part of it. A client may lower it with x-warmroute-first-token-timeout."""
    between_s: Seconds = 300.0
    """From one piece of an answer to the next."""
    total_s: Seconds | None = None
    """For a request in all, its time in the waiting room included. None by default; a client may set a lower one with
    x-warmroute-timeout."""


class Config(Section):
    """warmroute.yaml"""

    listen: Listen = Listen()
    """The inference API."""
    admin: Admin = Admin()
    """The admin API."""
    state_dir: Annotated[Path, BeforeValidator(_state_dir, json_schema_input_type=str | None)] = STATE_DIR
    """Where the index file and the deployment secret are kept; made with mode 0700."""
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
        if not _is_loopback(self.listen.host) and not _asks_for_certificates(self.listen.tls):
            notes.append(f"listen.host {self.listen.host} is not loopback: whoever reaches it may use the engines")
        if self.admin.enabled and not (_is_loopback(self.admin.host) or _asks_for_certificates(self.admin.tls)):
            notes.append(f"admin.host {self.admin.host} is not loopback, and the admin API has no login")
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
        for where, what in (*_contradictions(config), *(check(config) if check else ())):
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


# ---------------------------------------------------------------------------------------------------------------------
# What is right by itself and wrong together


def _contradictions(config: Config) -> Iterator[Mistake]:
    yield from _name_clashes(config)
    yield from _fallback_mistakes(config)
    yield from _failover_mistakes(config)
    yield from _engine_clashes(config)
    yield from _policy_clashes(config.policy)
    yield from _port_clashes(config)
    if config.listen.proxy_protocol and not config.listen.trusted_proxies:
        yield ("listen", "proxy_protocol"), "needs listen.trusted_proxies: from nobody else it would be believed"
    if config.listen.proxy_protocol and config.listen.tls is not None:
        yield ("listen", "proxy_protocol"), "comes before TLS, which is not supported with listen.tls (end TLS there)"
    drain = config.listen.drain
    if drain.accept_s > drain.finish_s:
        yield ("listen", "drain", "accept_s"), f"is longer than finish_s ({drain.finish_s:g}): no request outlives that"
    yield from _tls_mistakes(config)


def _failover_mistakes(config: Config) -> Iterator[Mistake]:
    rules: list[tuple[Where, Failover]] = [(("failover",), config.failover)]
    rules += [(("models", name, "failover"), model.failover) for name, model in config.models.items() if model.failover]
    for where, rule in rules:
        if rule.move_on_s is not None and "silent" not in rule.retry_on:
            yield (*where, "move_on_s"), 'does nothing unless retry_on has "silent"'


def _fallback_mistakes(config: Config) -> Iterator[Mistake]:
    declared = {engine.model for engine in config.engines}
    known = None if None in declared else declared | set(config.models) | set(config.aliases)
    for name, model in config.models.items():
        others: list[tuple[Where, str]] = [(("models", name, "split", other), other) for other in model.split]
        for key in ("fallbacks", "context_window_fallbacks"):
            others += [(("models", name, key, at), other) for at, other in enumerate(getattr(model, key))]
        for where, other in others:
            if other == name or config.aliases.get(other) == name:
                yield where, f"{other!r} is the model itself"
            elif known is not None and other not in known:
                yield where, f"no engine serves {other!r}"
        if model.split and name == "*":
            yield ("models", name, "split"), "is for a name of its own (write it under that)"
        elif model.split and name in declared:
            yield ("models", name, "split"), "has engines of its own (give the split another name)"
        for other in model.split:
            if other in config.models and config.models[other].split:
                yield ("models", name, "split", other), f"{other!r} is a split, too"
        if model.failover is not None and "share" in model.failover.model_fields_set:
            yield ("models", name, "failover", "share"), "is for all models together (write it under failover)"


def _name_clashes(config: Config) -> Iterator[Mistake]:
    owner: dict[str, str] = {}
    for name, model in config.models.items():
        for position, alias in enumerate(model.aliases):
            where: Where = ("models", name, "aliases", position)
            if alias == "*" or name == "*":
                yield where, "'*' stands for all other models: it has no alias and is none"
            elif alias in config.models:
                yield where, f"{alias!r} is a model of its own (take another alias)"
            elif alias in owner:
                yield where, f"{alias!r} is already an alias of {owner[alias]!r}"
            else:
                owner[alias] = name
    for position, engine in enumerate(config.engines):
        if engine.model in owner:
            yield ("engines", position, "model"), f"is an alias (write its model: {owner[engine.model]!r})"
        elif engine.model == "*":
            yield ("engines", position, "model"), "'*' is not a model (leave it out to take what the engine lists)"


def _engine_clashes(config: Config) -> Iterator[Mistake]:
    urls: dict[str, int] = {}
    ids: dict[str, int] = {}
    for position, engine in enumerate(config.engines):
        first = urls.setdefault(engine.url, position)
        if first != position:
            yield ("engines", position, "url"), f"is the same as engines[{first}].url (one entry an engine)"
            continue
        first = ids.setdefault(engine.id or engine.address, position)
        if first != position:
            yield ("engines", position, "id"), f"is the same as the id of engines[{first}] (ids must differ)"
        if not isinstance(engine.events, str):
            yield from _rank_clashes(("engines", position, "events"), engine.events)


def _rank_clashes(where: Where, sources: Sequence[Events]) -> Iterator[Mistake]:
    seen: set[int] = set()
    for position, source in enumerate(sources):
        if source.rank in seen:
            yield (*where, position, "rank"), f"rank {source.rank} is given twice (one entry a rank)"
        seen.add(source.rank)


def _policy_clashes(policy: PolicyChoice) -> Iterator[Mistake]:
    if policy.ttft_slo_per_1k_tokens_ms and policy.ttft_slo_s is None:
        yield ("policy", "ttft_slo_per_1k_tokens_ms"), "adds to ttft_slo_s, which is not given (SMetric takes 1)"
    for position, name in enumerate(policy.shadow):
        if name in policy.shadow[:position]:
            yield ("policy", "shadow", position), f"{name!r} is given twice"


def _port_clashes(config: Config) -> Iterator[Mistake]:
    listen, admin = config.listen, config.admin
    if admin.enabled and listen.port and (listen.host, listen.port) == (admin.host, admin.port):
        yield ("admin", "port"), f"is taken by listen ({listen.port}); use another"
    for position, engine in enumerate(config.engines):
        if engine.address == f"{listen.host}:{listen.port}":
            yield ("engines", position, "url"), "is the gateway's own address (write the engine's)"


def _tls_mistakes(config: Config) -> Iterator[Mistake]:
    """Files that are there but of no use; what contradicts itself."""
    for name, tls in (("listen", config.listen.tls), ("admin", config.admin.tls)):
        if tls is not None:
            try:
                check_server(tls.settings())
            except BadTlsFile as error:
                yield (name, "tls", error.key), error.what
    for position, engine in enumerate(config.engines):
        where: Where = ("engines", position, "tls")
        tls_there, settings = engine.tls, engine.client_tls
        if tls_there is None:
            continue
        if settings is None:
            yield where, "is for an https:// url (and this one is http)"
        elif tls_there.key and not tls_there.cert:
            yield (*where, "key"), "is the key of a certificate: cert is missing"
        elif tls_there.ca and not tls_there.verify:
            yield (*where, "verify"), "is false, so that ca is of no use (leave one of them out)"
        else:
            try:
                check_client(settings)
            except BadTlsFile as error:
                yield (*where, error.key), error.what


def _asks_for_certificates(tls: ListenTls | None) -> bool:
    return tls is not None and tls.client_ca is not None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
