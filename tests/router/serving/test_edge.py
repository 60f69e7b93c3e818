"""Routes, CORS, ids: what goes with every answer."""

from __future__ import annotations

from typing import Any

import pytest

from router.serving.models import ServedModel
from tests.router.serving.stand import EngineSide, Stand

CHAT = {"model": "m-chat", "messages": [{"role": "user", "content": "hello"}]}


async def echo(engine: EngineSide) -> None:
    await engine.whole(b'{"choices":[]}')


@pytest.mark.parametrize("prefix", ["/v1", ""])
async def test_routes_work_with_and_without_v1(stand: Stand, prefix: str) -> None:
    await stand.start(echo)
    assert (await stand.ask(CHAT, path=prefix + "/chat/completions")).status == 200
    assert (await stand.ask({"model": "m-chat", "prompt": "x"}, path=prefix + "/completions")).status == 200
    assert (await stand.ask(method="GET", path=prefix + "/models")).status == 200
    assert (await stand.ask(method="GET", path=prefix + "/models/alias")).json["id"] == "alias"
    assert [side.head.split()[1] for side in stand.engine.seen] == [b"/v1/chat/completions", b"/v1/completions"]


async def test_models_are_listed_with_their_other_names(stand: Stand) -> None:
    await stand.start()
    stand.models.replace(
        [
            ServedModel("org/big", stand.prompts, aliases=("big",), loras=("big-tuned",), max_model_tokens=4096),
            ServedModel("small", stand.prompts),
        ]
    )
    listing = (await stand.ask(method="GET", path="/v1/models")).json
    assert listing["object"] == "list"
    cards = {card["id"]: card for card in listing["data"]}
    assert set(cards) == {"org/big", "big", "big-tuned", "small"}
    assert cards["big-tuned"] == {
        "id": "big-tuned",
        "object": "model",
        "created": 0,
        "owned_by": "warmroute",
        "root": "org/big",
        "parent": "org/big",
        "max_model_len": 4096,
    }
    assert "max_model_len" not in cards["small"]
    for path in ("/v1/models/org/big", "/v1/models/org%2Fbig"):
        assert (await stand.ask(method="GET", path=path)).json == cards["org/big"]
    missing = await stand.ask(method="GET", path="/v1/models/none")
    assert (missing.status, missing.json["error"]["code"]) == (404, "model_not_found")


async def test_health_and_readiness(stand: Stand) -> None:
    state: dict[str, Any] = {"ready": False, "models": {"m-chat": {"prompts": "DEGRADED"}}}

    async def readiness() -> dict[str, Any]:
        return state

    await stand.start(readiness=readiness)
    healthz = await stand.ask(method="GET", path="/healthz")
    assert (healthz.status, healthz.json) == (200, {"status": "ok"})
    readyz = await stand.ask(method="GET", path="/readyz")
    assert (readyz.status, readyz.json) == (503, state)
    state["ready"] = True
    assert (await stand.ask(method="GET", path="/readyz")).status == 200
    assert stand.outcomes == []


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "unknown_url"),
        ("POST", "/v1/images/generations", 404, "unknown_url"),
        ("GET", "/v1/embeddings", 405, "method_not_allowed"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("DELETE", "/v1/models/alias", 405, "method_not_allowed"),
        ("GET", "/metrics", 404, "unknown_url"),
        ("GET", "/admin/v1/fleet", 404, "unknown_url"),
    ],
)
async def test_other_routes_are_refused_in_the_openai_shape(
    stand: Stand, method: str, path: str, status: int, code: str
) -> None:
    await stand.start(echo)
    answer = await stand.ask(method=method, path=path)
    assert (answer.status, answer.json["error"]["code"]) == (status, code)
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("given", "kept"),
    [("client-id.1:x", True), ("a" * 128, True), ("a" * 129, False), ("has space", False), ("-x", False), ("é", False)],
)
async def test_a_sane_request_id_is_kept(stand: Stand, given: str, kept: bool) -> None:
    await stand.start(echo)
    answer = await stand.ask(CHAT, headers={"x-request-id": given})
    shown = answer.headers["x-request-id"]
    assert (shown == given) == kept
    assert stand.outcome.request_id == shown


async def test_two_requests_of_one_client_id_are_two_for_the_engine(stand: Stand) -> None:
    await stand.start(echo)
    for _ in range(2):
        await stand.ask(CHAT, headers={"x-request-id": "same"})
    ids = {side.headers["x-request-id"] for side in stand.engine.seen}
    assert len(ids) == 2


async def test_browsers_are_let_in_only_from_configured_origins(stand: Stand) -> None:
    await stand.start(echo, origins=("https://chat.example",))
    origin = {"origin": "https://chat.example"}
    preflight = await stand.ask(
        method="OPTIONS",
        path="/v1/chat/completions",
        headers={**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"},
    )
    assert preflight.status == 204
    assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
    assert preflight.headers["access-control-allow-headers"] == "authorization"
    assert "POST" in preflight.headers["access-control-allow-methods"]
    for answer in (await stand.ask(CHAT, headers=origin), await stand.ask(b"{", headers=origin)):
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
    stranger = await stand.ask(CHAT, headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in stranger.headers
    assert stranger.headers["vary"] == "origin"


async def test_no_origin_is_let_in_by_default(stand: Stand) -> None:
    await stand.start(echo)
    answer = await stand.ask(method="OPTIONS", path="/v1/models", headers={"origin": "https://chat.example"})
    assert answer.status == 204
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(("path", "status"), [("/v1/chat/completions", 503), ("/v1/messages", 529), ("/readyz", 503)])
async def test_a_connection_too_many_is_told_to_try_again(stand: Stand, path: str, status: int) -> None:
    await stand.start(connections=1)
    await stand.connect()
    answer = await stand.ask({}, path=path)
    assert answer.status == status
    assert answer.headers["retry-after"] == "1"
    assert answer.headers["x-request-id"]
    assert "as many connections" in answer.json["error"]["message"]
    assert [outcome.error for outcome in stand.outcomes] == ["overloaded"] * (path != "/readyz")
