"""The sections of models, and what is done about time and failures."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from router.config.section import Section
from router.config.values import File, Seconds, Text, Tokenizer


class ModelTimeouts(Section):
    """Seconds; see timeouts."""

    first_byte_s: Seconds | None = None
    """To the first token of a stream, or the first byte of another answer."""
    between_s: Seconds | None = None
    """From one piece of an answer to the next."""
    total_s: Seconds | None = None
    """For a request in all."""


class Failover(Section):
    """What is done about an engine that fails before the first byte of its answer. After it nothing is tried again,
    unless resume says so."""

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
    resume: bool = False
    """true: a stream that breaks off amid its answer is gone on with by another engine, from the text the client has.
    Chat (vLLM and SGLang, where the model's template is read here) and completions with one choice of plain text; what
    has a seed, log-probabilities, guided output or a tool's call begun ends with an error as ever. Chunks of the second
    engine carry "warmroute": {"resumed": 1}. It counts as an attempt, and may begin within_s after the break."""
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
