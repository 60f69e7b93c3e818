"""The admin API over a fake `Live`, in the same process and in one of its own."""

import multiprocessing
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.admin.api import create_app
from router.admin.serve import AdminServer, AdminSettings, run
from router.errors import BadRequest, Conflict, UnknownInstance
from router.wire import WireServer, live_methods


class FakeLive:
    ready = True
    mistakes: tuple[str, ...] = ()

    async def fleet(self) -> list[dict[str, Any]]:
        return [{"instance": "a", "rank": 0, "state": "ready"}]

    async def explain(self, path: str, body: bytes, tenant: str | None = None) -> dict[str, Any]:
        if not body.startswith(b"{"):
            raise BadRequest("the body is not a JSON object", code="invalid_json")
        return {"path": path, "bytes": len(body), "tenant": tenant}

    async def parity(self, model: str | None) -> list[dict[str, Any]]:
        return [{"model": model, "state": "EXACT"}]

    async def isolation(self) -> dict[str, Any]:
        return {"engines": [], "domains": {}}

    async def readiness(self) -> dict[str, Any]:
        return {"ready": self.ready, "models": {}}

    async def requests(self, request_id: str | None) -> list[dict[str, Any]]:
        receipts = [{"request_id": "r-2"}, {"request_id": "r-1"}]
        return [r for r in receipts if request_id in (None, r["request_id"])]

    async def instances(self) -> list[dict[str, Any]]:
        return [{"id": "a", "state": "ready"}]

    async def models(self) -> list[dict[str, Any]]:
        return [{"id": "m", "state": "ready", "aliases": ["fast"]}, {"id": "later", "state": "pending"}]

    async def policies(self) -> list[dict[str, Any]]:
        return [{"id": "kv_aware", "default": True, "models": [], "weights": {"price": 1.0}, "shadow": None}]

    async def config(self) -> dict[str, Any]:
        return {"config": {"listen": {"port": 4000}}, "changed": [], "needs_restart": ["listen.port"]}

    async def drain(self, instance_id: str) -> dict[str, Any]:
        if instance_id != "[::1]:8000":
            raise UnknownInstance(f"There is no engine {instance_id!r}.")
        return {"id": instance_id, "state": "draining"}

    async def undrain(self, instance_id: str) -> dict[str, Any]:
        raise Conflict("It is no longer configured.")

    async def reload(self) -> dict[str, Any]:
        if self.mistakes:
            return {"mistakes": self.mistakes}
        return {"changed": ["policy.weights"], "needs_restart": ["listen.port"]}

    async def metrics(self) -> bytes:
        return b"warmroute_up 1\n"

    async def trace(self, position: int) -> tuple[list[bytes], int | None]:
        return [], None


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    app = httpx.ASGITransport(create_app(FakeLive()))
    async with httpx.AsyncClient(transport=app, base_url="http://admin") as client:
        yield client


async def test_the_fleet_is_a_list(client: httpx.AsyncClient) -> None:
    answer = (await client.get("/admin/v1/fleet")).json()
    assert answer == {"object": "list", "data": [{"instance": "a", "rank": 0, "state": "ready"}]}


async def test_explain_passes_route_body_and_tenant(client: httpx.AsyncClient) -> None:
    answer = await client.post("/admin/v1/explain?path=/v1/completions&tenant=acme", content=b'{"model":"m"}')
    assert answer.json() == {"path": "/v1/completions", "bytes": 13, "tenant": "acme"}
    assert (await client.post("/admin/v1/explain", content=b"{}")).json()["tenant"] is None


async def test_explain_of_nonsense_is_an_openai_error(client: httpx.AsyncClient) -> None:
    answer = await client.post("/admin/v1/explain", content=b"hello")
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"


async def test_receipts_newest_first_and_by_id(client: httpx.AsyncClient) -> None:
    assert [r["request_id"] for r in (await client.get("/admin/v1/requests")).json()["data"]] == ["r-2", "r-1"]
    assert (await client.get("/admin/v1/requests/r-1")).json() == {"request_id": "r-1"}
    assert (await client.get("/admin/v1/requests/r-9")).status_code == 404


async def test_readiness_is_a_status(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await client.get("/readyz")).status_code == 200
    monkeypatch.setattr(FakeLive, "ready", False)
    assert (await client.get("/readyz")).status_code == 503


async def test_an_engine_is_drained_by_its_name(client: httpx.AsyncClient) -> None:
    assert (await client.get("/admin/v1/instances")).json() == {
        "object": "list",
        "data": [{"id": "a", "state": "ready"}],
    }
    drained = await client.post("/admin/v1/instances/%5B::1%5D:8000/drain")
    assert drained.json() == {"id": "[::1]:8000", "state": "draining"}
    unknown = await client.post("/admin/v1/instances/b/drain")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "instance_not_found")
    leaving = await client.post("/admin/v1/instances/a/undrain")
    assert (leaving.status_code, leaving.json()["error"]["code"]) == (409, "conflict")


async def test_a_reload_says_what_changed(client: httpx.AsyncClient) -> None:
    answer = await client.post("/admin/v1/config/reload")
    assert answer.status_code == 200
    assert answer.json() == {
        "object": "config.reload",
        "changed": ["policy.weights"],
        "needs_restart": ["listen.port"],
    }


async def test_a_reload_of_nonsense_is_400_with_every_mistake(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeLive, "mistakes", ("w.yaml:1: listen.port: no", "w.yaml:2: engines: no"))
    answer = await client.post("/admin/v1/config/reload")
    assert answer.status_code == 400
    assert answer.json()["mistakes"] == ["w.yaml:1: listen.port: no", "w.yaml:2: engines: no"]
    assert answer.json()["error"]["code"] == "invalid_config"


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", "/admin/v1/requests/r-9", 404, "no receipt of 'r-9': only the last ones are kept"),
        ("GET", "/admin/v1/requests?limit=0", 400, "limit: Input should be greater than or equal to 1"),
        ("POST", "/admin/v1/explain?path=x", 400, "path: Input should be '/v1/chat/completions', "),
        ("POST", "/admin/v1/fleet", 405, "Method Not Allowed"),
        ("GET", "/admin/v1/nothing", 404, "Not Found"),
    ],
)
async def test_every_error_is_the_same_object(
    client: httpx.AsyncClient, method: str, path: str, status: int, message: str
) -> None:
    answer = await client.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["message"].startswith(message)
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


async def test_the_schema_says_what_is_answered(client: httpx.AsyncClient) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    answered = {
        (path, "post" if path.endswith("explain") else "get", str(answer.status_code)): answer.headers["content-type"]
        for path, answer in (
            ("/readyz", await client.get("/readyz")),
            ("/metrics", await client.get("/metrics")),
            ("/admin/v1/requests/{request_id}", await client.get("/admin/v1/requests/r-9")),
            ("/admin/v1/explain", await client.post("/admin/v1/explain", content=b"hello")),
            ("/admin/v1/trace", await client.get("/admin/v1/trace")),
        )
    }
    for (path, method, status), content_type in answered.items():
        documented = paths[path][method]["responses"][status]
        assert content_type.partition(";")[0] in documented.get("content", {"application/json": {}})
        assert "default" in paths[path][method]["responses"]
    assert "503" in paths["/readyz"]["get"]["responses"]
    assert paths["/admin/v1/explain"]["post"]["requestBody"]["required"]


async def test_in_one_process() -> None:
    server = AdminServer(FakeLive(), AdminSettings("127.0.0.1", 0))
    port = await server.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        assert (await client.get("/metrics")).text == "warmroute_up 1\n"
    await server.stop()


async def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    wire = WireServer(live_methods(FakeLive()))
    await wire.start(tmp_path / "live")
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=run, args=(str(tmp_path / "live"), AdminSettings("127.0.0.1", 0), there))
    process.start()
    try:
        assert here.poll(20)
        port = here.recv()
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # for the parent, and sent to the whole group
            os.kill(process.pid or 0, number)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert (await client.post("/admin/v1/parity?model=m")).json()["data"] == [{"model": "m", "state": "EXACT"}]
            assert (await client.post("/admin/v1/explain", content=b"hello")).status_code == 400
            assert (await client.get("/admin/v1/instances")).json()["data"] == [{"id": "a", "state": "ready"}]
            assert (await client.post("/admin/v1/instances/%5B::1%5D:8000/drain")).json()["state"] == "draining"
            assert (await client.post("/admin/v1/instances/b/drain")).json()["error"]["code"] == "instance_not_found"
            assert (await client.post("/admin/v1/instances/a/undrain")).status_code == 409
            assert (await client.post("/admin/v1/config/reload")).json()["needs_restart"] == ["listen.port"]
    finally:
        here.close()
        process.join(10)
        process.kill()
        await wire.stop()
    assert process.exitcode == 0
