"""The section of engines."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from pydantic import BeforeValidator, Discriminator, Field, SecretStr, Tag

from router.config.section import Section, text
from router.config.values import (
    RATE_PROFILES,
    EngineUrl,
    EventEndpoint,
    File,
    Identifier,
    Milliseconds,
    RateProfile,
    ServerName,
    Text,
    Tokens,
)
from router.core import ClientTls, EventSource, Instance, Need, Rates


def _rates(value: Any) -> Any:
    return {"profile": value} if isinstance(value, str) else value


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
    lacks: tuple[Need, ...] = ()
    """What requests for it may not carry, so that they go to an engine of the model that takes it: image, audio, video,
    tools. What an engine says of itself need not be said here (SGLang: images, sound)."""
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
    max_running_requests: Annotated[int, Field(ge=1)] | None = None
    """Requests one rank works on at a time (vLLM: --max-num-seqs), so that further ones wait here, where priorities and
    tenants' shares hold, and not in the engine. By default what the engine tells: SGLang, llama.cpp and TGI do."""
    rates: Annotated[EngineRates | None, BeforeValidator(_rates, json_schema_input_type=str | EngineRates | None)] = (
        None
    )
    """How fast it is: the name of a profile, or numbers. By default llama-3.1-8b-h100. Corrected while running:
    engines of a model with the same rates together, one that differs from them by a fifth by itself."""
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
        return ClientTls(text(tls.ca), text(tls.cert), text(tls.key), name, tls.verify)

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
            max_running_requests=self.max_running_requests,
            price_per_hour=self.price_per_hour,
            tls=self.client_tls,
            lacks=self.lacks,
        )

    def _event_sources(self) -> tuple[EventSource, ...] | None:
        if isinstance(self.events, str):
            return None if self.events == "auto" else ()
        return tuple(EventSource(e.rank, e.endpoint, e.replay, e.topic) for e in self.events)
