"""`warmroute sim-engine`: an engine without a GPU, for trying and testing what stands in front of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from router.lab.engine import Order
from router.lab.options import SimEngineOptions
from router.lab.profiles import PROFILES
from router.lab.server import SimEngineServer, run

DEFAULTS = SimEngineOptions()
PROFILE_NAMES = ", ".join(PROFILES)


def sim_engine(
    model: Annotated[str, typer.Option(help="The name it serves.")] = DEFAULTS.model,
    profile: Annotated[
        str, typer.Option(help=f"How fast it is and how much it holds: {PROFILE_NAMES}.")
    ] = DEFAULTS.profile,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = DEFAULTS.host,
    port: Annotated[int, typer.Option(help="HTTP port; 0 takes a free one.")] = DEFAULTS.port,
    speed: Annotated[float, typer.Option(help="2 runs twice as fast as the real engine.")] = DEFAULTS.speed,
    block_size: Annotated[int, typer.Option(help="Tokens in a KV block.")] = DEFAULTS.block_size,
    capacity_tokens: Annotated[int | None, typer.Option(help="KV cache, tokens; the profile's by default.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Most requests running at once.")] = None,
    max_batched_tokens: Annotated[int | None, typer.Option(help="Most tokens computed in one step.")] = None,
    max_model_tokens: Annotated[int | None, typer.Option(help="Longest prompt and answer together.")] = None,
    max_queued: Annotated[int | None, typer.Option(help="Requests that may wait; further ones get a 503.")] = None,
    order: Annotated[Order, typer.Option(help="Which waiting request goes first.")] = DEFAULTS.order,
    events_port: Annotated[int, typer.Option(help="Where KV events are published; 0 takes a free port.")] = 0,
    replay_port: Annotated[int, typer.Option(help="Where missed events can be asked for; 0 takes a free port.")] = 0,
    events: Annotated[bool, typer.Option(help="Publish KV events.")] = True,
    replay: Annotated[bool, typer.Option(help="Replay missed events.")] = True,
    buffer_steps: Annotated[int, typer.Option(help="Event batches kept for replay.")] = DEFAULTS.buffer_steps,
    api_key: Annotated[str | None, typer.Option(help="Refuse requests without this bearer key.")] = None,
    lora: Annotated[list[str] | None, typer.Option(help="A LoRA adapter it serves too. Repeat for more.")] = None,
    report_cached: Annotated[
        bool, typer.Option(help="Say in usage how much was cached (vLLM: --enable-prompt-tokens-details).")
    ] = DEFAULTS.report_cached,
    output_tokens: Annotated[
        int, typer.Option(help="Mean length of an answer that ends by itself.")
    ] = DEFAULTS.output_tokens,
    seed: Annotated[int, typer.Option(help="Decides texts and lengths of answers.")] = DEFAULTS.seed,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A directory with tokenizer.json and a chat template. [default: ours]")
    ] = None,
) -> None:
    """Run a simulated engine.

    It looks like vLLM 0.32 to clients and gateways: OpenAI routes, metrics, KV events on ZMQ with replay. Batching,
    prefix cache, eviction and step times are modelled after the profile's real engine; the text is nonsense.
    """
    try:
        options = SimEngineOptions(
            model=model,
            profile=profile,
            host=host,
            port=port,
            speed=speed,
            block_size=block_size,
            capacity_tokens=capacity_tokens,
            max_num_seqs=max_num_seqs,
            max_batched_tokens=max_batched_tokens,
            max_model_tokens=max_model_tokens,
            max_queued=max_queued,
            order=order,
            events_port=events_port if events else None,
            replay_port=replay_port if events and replay else None,
            buffer_steps=buffer_steps,
            api_key=api_key,
            loras=tuple(lora or ()),
            report_cached=report_cached,
            output_tokens=output_tokens,
            seed=seed,
            tokenizer=tokenizer or DEFAULTS.tokenizer,
        )
        run(options, ready=announce)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None


def announce(engine: SimEngineServer) -> None:
    """Where it can be reached, one line a service, so that a script can read it."""
    print(f"engine {engine.url}")
    if engine.events_endpoint:
        print(f"events {engine.events_endpoint}")
    if engine.replay_endpoint:
        print(f"replay {engine.replay_endpoint}")
    sys.stdout.flush()
