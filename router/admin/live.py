"""What runs, and why a request went where it went: a client of `core.Live`, nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

from router.admin.access import Needs
from router.admin.answers import ERROR_ANSWER, Documented, error_answer
from router.admin.trace import trace_lines
from router.core import Live

Path = Literal["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/inference/v1/generate"]
_CHAT: Path = "/v1/chat/completions"

_NOT_READY: Documented = {503: {"description": "no model has a ready engine; the same body"}}
_NO_RECEIPT: Documented = {
    404: {"description": "no receipt of this request, or none any more", "content": ERROR_ANSWER}
}
_NO_COMPLETION: Documented = {
    400: {"description": "the gateway would refuse this body", "content": ERROR_ANSWER},
    404: {"description": "the body names a model that nobody serves", "content": ERROR_ANSWER},
}
_COMPLETION_BODY = {
    "requestBody": {
        "required": True,
        "description": "what a client would send to `path`",
        "content": {
            "application/json": {"schema": {"type": "object", "properties": {"model": {"type": ["string", "null"]}}}}
        },
    }
}


def health_router(live: Live, metrics_need: Sequence[Any]) -> APIRouter:
    """`metrics_need`: dependencies of the metrics page; none: it is open."""
    router = APIRouter(tags=["health"])

    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        """This process lives. Says nothing about engines."""
        return {"status": "ok"}

    @router.get("/readyz", responses=_NOT_READY)
    async def readyz() -> JSONResponse:
        """200 when at least one model has a ready engine, else 503; per model, whether its prompts are read exactly."""
        state = await live.readiness()
        return JSONResponse(state, status_code=200 if state["ready"] else 503)

    @router.get("/metrics", response_class=PlainTextResponse, dependencies=metrics_need)
    async def metrics() -> Response:
        """The figures of relay and brain in Prometheus text format."""
        return Response(await live.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


def live_router(live: Live, needs: Needs) -> APIRouter:
    """What runs: engines, decisions, receipts, the configuration."""
    router = APIRouter()
    _inspection(router, live, needs)
    _operation(router, live, needs)
    _trace(router, live, needs)
    return router


def _inspection(router: APIRouter, live: Live, needs: Needs) -> None:
    see = [needs("fleet:read", all_tenants=True)]
    decisions = [needs("decisions:read", all_tenants=True)]

    @router.get("/fleet", tags=["fleet"], dependencies=see)
    async def fleet() -> dict[str, Any]:
        """One row a rank: state and why, load, bookings, index, confidence, hit rate, TTFT."""
        return {"object": "list", "data": await live.fleet()}

    @router.post(
        "/explain",
        tags=["decisions"],
        responses=_NO_COMPLETION,
        openapi_extra=_COMPLETION_BODY,
        dependencies=decisions,
    )
    async def explain(
        request: Request,
        path: Annotated[Path, Query(description="the route the body is meant for")] = _CHAT,
        tenant: Annotated[str | None, Query(description="whose request it would be: id or name")] = None,
    ) -> dict[str, Any]:
        """Where an OpenAI request body would go now: every candidate with the parts of its cost. Sends nothing."""
        return await live.explain(path, await request.body(), tenant)

    @router.get("/requests", tags=["decisions"], dependencies=decisions)
    async def requests(limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> dict[str, Any]:
        """Receipts of the last requests, newest first."""
        return {"object": "list", "data": (await live.requests(None))[:limit]}

    @router.get("/requests/{request_id}", tags=["decisions"], responses=_NO_RECEIPT, dependencies=decisions)
    async def receipt(request_id: str) -> dict[str, Any]:
        """The receipt of one request: decision, hits predicted and delivered, how it ended."""
        found = await live.requests(request_id)
        if not found:
            raise HTTPException(404, f"no receipt of {request_id!r}: only the last ones are kept")
        return found[0]

    @router.post("/parity", tags=["fleet"], dependencies=[needs("fleet:write", all_tenants=True)])
    async def parity(model: str | None = None) -> dict[str, Any]:
        """Compares our tokens with the engines' own on the probe set again, for one model or all."""
        return {"object": "list", "data": await live.parity(model)}


def _operation(router: APIRouter, live: Live, needs: Needs) -> None:
    see, change = [needs("instances:read", all_tenants=True)], [needs("instances:write", all_tenants=True)]

    @router.get("/instances", tags=["instances"], dependencies=see)
    async def instances() -> dict[str, Any]:
        """One row an engine: what it serves, its state and why, how many requests run there."""
        return {"object": "list", "data": await live.instances()}

    @router.post("/instances/{instance_id}/drain", tags=["instances"], dependencies=change)
    async def drain(instance_id: str) -> dict[str, Any]:
        """No new requests for this engine; those that run go on. Until it is undrained, or the gateway restarts."""
        return await live.drain(instance_id)

    @router.post("/instances/{instance_id}/undrain", tags=["instances"], dependencies=change)
    async def undrain(instance_id: str) -> dict[str, Any]:
        """It gets requests again, if it answers its polls. 409 if it is no longer configured."""
        return await live.undrain(instance_id)

    @router.get("/config", tags=["config"], dependencies=[needs("config:read", all_tenants=True)])
    async def config() -> dict[str, Any]:
        """The configuration in force, defaults and all, with stars for what is secret.

        `changed`: keys that the file says otherwise by now, and a reload would take over; `needs_restart`: those it
        would not; `mistakes`, if the file has any.
        """
        return {"object": "config", **await live.config()}

    @router.post(
        "/config/reload",
        tags=["config"],
        responses={400: {}, 409: {}},
        dependencies=[needs("config:write", all_tenants=True)],
    )
    async def reload() -> JSONResponse:
        """Reads the configuration file again, as SIGHUP does: what changed, and which keys need a restart.

        400 with every mistake and its line if it is not valid; the old one stays in force then.
        """
        answer = await live.reload()
        if "mistakes" not in answer:
            return JSONResponse({"object": "config.reload", **answer})
        message = "The configuration is not valid; the one before stays in force."
        return error_answer(400, message, code="invalid_config", beside={"mistakes": answer["mistakes"]})


def _trace(router: APIRouter, live: Live, needs: Needs) -> None:
    @router.get(
        "/trace",
        tags=["trace"],
        response_class=_JsonLines,
        dependencies=[needs("decisions:read", all_tenants=True)],
    )
    async def trace(
        since: Annotated[float, Query(ge=0, description="arrived at this time or later: seconds since 1970")] = 0.0,
        model: Annotated[str | None, Query(description="of this public model only")] = None,
    ) -> StreamingResponse:
        """The requests served lately as JSON lines, for a replay: arrival, lengths, salted names of blocks; no text."""
        pieces = trace_lines(live, since=since, model=model)
        first = await anext(pieces, b"")  # what fails at once is still answered as an error
        return _JsonLines(_from(first, pieces))


class _JsonLines(StreamingResponse):
    media_type = "application/x-ndjson"


async def _from(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in rest:
        yield piece
