"""Routes that are relayed as they are: bytes unchanged both ways, placed by load, counted as input."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.core import Usage
from router.serving.apis import APIS, ROUTES
from tests.router.serving.stand import STREAM_HEAD, EngineSide, Stand

EMBEDDINGS = {"model": "m-chat", "input": "hi"}


def answering(body: bytes, status: int = 200, **headers: str) -> Any:
    async def engine(side: EngineSide) -> None:
        await side.whole(body, status=status, headers=headers)

    return engine


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ("/v1/embeddings", "/v1/embeddings"),
        ("/embeddings", "/v1/embeddings"),
        ("/v1/rerank", "/v1/rerank"),
        ("/rerank", "/v1/rerank"),
        ("/v2/rerank", "/v2/rerank"),
        ("/v2/embed", "/v2/embed"),
        ("/score", "/v1/score"),
        ("/v1/score", "/v1/score"),
        ("/classify", "/classify"),
        ("/v1/classify", "/v1/classify"),
        ("/pooling", "/pooling"),
        ("/tokenize", "/tokenize"),
        ("/v1/tokenize", "/tokenize"),
        ("/detokenize", "/detokenize"),
        ("/inference/v1/generate", "/inference/v1/generate"),
    ],
)
async def test_bytes_pass_unchanged_both_ways(stand: Stand, asked: str, sent: str) -> None:
    """https://github.com/BerriAI/litellm/issues/42426"""
    body = b'{"model":"m-chat",  "input": [1,2], "encoding_format":"base64", "x": 1e400, "y": "\\ud83d"}'
    answered = b'[{"embedding": "AACAPw=="} ]'
    stand.placement.served = "m-chat"
    await stand.start(answering(answered))
    answer = await stand.ask(body, path=asked)
    assert (answer.status, answer.body) == (200, answered)
    (side,) = stand.engine.seen
    assert side.head.split()[1].decode() == sent
    assert side.body == body
    assert stand.outcome.finish == "complete"


async def test_the_name_the_engine_knows_is_all_that_changes(stand: Stand) -> None:
    await stand.start(answering(b"{}"))
    await stand.ask(b'{"input":"hi", "model":"alias"}', path="/v1/embeddings")
    assert stand.engine.seen[0].body == b'{"input":"hi","model":"served-name"}'


async def test_embeddings_are_input_only_and_their_prompt_is_not_read(stand: Stand) -> None:
    usage = {"prompt_tokens": 3, "total_tokens": 3}
    await stand.start(answering(json.dumps({"data": [{"embedding": [0.5] * 40_000}], "usage": usage}).encode()))
    await stand.ask({"model": "m-chat", "input": [[1, 2], [3]]}, path="/v1/embeddings")
    outcome, (ask,) = stand.outcome, stand.placement.asks
    assert outcome.usage == Usage(input_tokens=3, output_tokens=0, cached_tokens=None)
    assert (outcome.input_tokens, outcome.prompt_source) == (3, "none")
    assert stand.prompts.seen == []
    assert (ask.prompt.tokens, ask.prompt.keys, ask.max_output_tokens) == (3, {}, 0)


@pytest.mark.parametrize(
    ("path", "fields", "tokens"),
    [
        ("/v1/embeddings", {"input": [5, 6, 7]}, 3),
        ("/v1/embeddings", {"input": "x" * 4000}, 1000),
        ("/v1/embeddings", {"input": ["x" * 2000] * 2}, 1000),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": "x" * 4000}]}, 1000),
        ("/v1/rerank", {"query": "q", "documents": ["x" * 4000]}, 1000),
        ("/v1/score", {"text_1": "q", "text_2": ["x" * 2000] * 2}, 1000),
        ("/tokenize", {"prompt": "x" * 4000}, 1),
    ],
)
async def test_they_weigh_what_they_are_long(stand: Stand, path: str, fields: dict[str, Any], tokens: int) -> None:
    await stand.start(answering(b"{}"))
    await stand.ask({"model": "m-chat", **fields}, path=path)
    assert stand.placement.asks[0].prompt.tokens == pytest.approx(tokens, abs=30 if tokens > 100 else 0)


@pytest.mark.parametrize(
    ("status", "body"),
    [(404, b'{"detail":"Not Found"}'), (405, b'{"detail":"Method Not Allowed"}'), (501, b'{"error":{"message":"no"}}')],
)
async def test_an_engine_without_the_route_is_not_blamed(stand: Stand, status: int, body: bytes) -> None:
    await stand.start(answering(body, status))
    answer = await stand.ask(EMBEDDINGS, path="/v1/embeddings")
    assert (answer.status, answer.json["error"]["code"]) == (404, "unknown_url")
    assert answer.json["error"]["message"] == "The engine of this model does not serve this route."
    assert (stand.outcome.finish, stand.outcome.error) == ("complete", "engine_404")


async def test_an_unknown_name_is_still_an_unknown_model(stand: Stand) -> None:
    await stand.start(answering(b'{"error":{"message":"The model `x` does not exist. Valid: secret","code":404}}', 404))
    answer = await stand.ask(EMBEDDINGS, path="/v1/embeddings")
    assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found")
    assert b"secret" not in answer.body


async def test_a_clients_mistake_is_said_in_the_engines_words(stand: Stand) -> None:
    await stand.start(
        answering(b'{"error":{"message":"dimensions must be 64","type":"BadRequestError","code":400}}', 400)
    )
    answer = await stand.ask(EMBEDDINGS, path="/v1/embeddings")
    assert (answer.status, answer.json["error"]["message"]) == (400, "dimensions must be 64")
    bad = await stand.ask(b"[]", path="/v1/rerank")
    assert (bad.status, bad.json["error"]["code"]) == (400, "invalid_json")


async def test_ids_in_sampling_parameters_of_their_own(stand: Stand) -> None:
    body = {"model": "m-chat", "token_ids": [1, 2], "sampling_params": {"n": 2, "max_tokens": 7}, "stream": True}

    async def engine(side: EngineSide) -> None:
        await side.raw(STREAM_HEAD)
        for index in (0, 1):
            event = {"usage": None, "choices": [{"index": index, "finish_reason": "length", "token_ids": [5]}]}
            await side.chunk(b"data: %b\n\n" % json.dumps(event).encode())
        await side.chunk(b"data: [DONE]\n\n")
        await side.raw(b"0\r\n\r\n")

    await stand.start(engine)
    answer = await stand.ask(body, path="/inference/v1/generate")
    assert (answer.broken, answer.body.count(b"token_ids"), answer.body[-14:]) == (False, 2, b"data: [DONE]\n\n")
    (ask,) = stand.placement.asks
    assert (ask.choices, ask.max_output_tokens) == (2, 7)
    assert stand.prompts.seen[0][0] == "/inference/v1/generate"


def test_every_route_leads_to_an_api() -> None:
    assert set(ROUTES.values()) == set(APIS)
    assert all(path.startswith("/") for path in ROUTES)
