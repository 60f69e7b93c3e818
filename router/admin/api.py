"""The admin API: what the fleet does and why a request went where it went; a client of `core.Live`, nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, Literal

from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from router import __version__
from router.admin.trace import trace_lines
from router.core import Live
from router.errors import WarmrouteError

Path = Literal["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/inference/v1/generate"]
_CHAT: Path = "/v1/chat/completions"

Documented = dict[int | str, dict[str, Any]]

_ERROR = {
    "type": "object",
    "required": ["message", "type", "param", "code"],
    "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": {}, "code": {}},
}
_ERROR_ANSWER = {
    "application/json": {"schema": {"type": "object", "required": ["error"], "properties": {"error": _ERROR}}}
}
_ANY: Documented = {"default": {"description": "an error, as an OpenAI error object", "content": _ERROR_ANSWER}}
_NOT_READY: Documented = {503: {"description": "no model has a ready engine; the same body"}}
_NO_RECEIPT: Documented = {
    404: {"description": "no receipt of this request, or none any more", "content": _ERROR_ANSWER}
}
_NO_COMPLETION: Documented = {
    400: {"description": "the gateway would refuse this body", "content": _ERROR_ANSWER},
    404: {"description": "the body names a model that nobody serves", "content": _ERROR_ANSWER},
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


def create_app(live: Live) -> FastAPI:
    """The ASGI application on port 4001."""
    app = FastAPI(
        title="warmroute admin",
        version=__version__,
        description="What the fleet holds and does, and why each request went where it went.",
        docs_url=None,  # its page would load scripts from a CDN; the schema is at /openapi.json
        redoc_url=None,
        responses=_ANY,
    )
    app.exception_handler(WarmrouteError)(_render)
    app.exception_handler(RequestValidationError)(_render_invalid)
    app.exception_handler(StarletteHTTPException)(_render_http)
    _health(app, live)
    _inspection(app, live)
    _operation(app, live)
    _trace(app, live)
    return app


async def _render(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, WarmrouteError)
    return _error(error.status, error.message, type=error.type, param=error.param, code=error.code)


async def _render_invalid(_: Request, error: Exception) -> JSONResponse:
    """A parameter that does not fit; the first one, if there are several."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    *_, name = first["loc"]
    return _error(422, f"{name}: {first['msg']}", param=str(name), code="invalid_parameter")


async def _render_http(_: Request, error: Exception) -> JSONResponse:
    """What routing refuses, and `HTTPException`s."""
    assert isinstance(error, StarletteHTTPException)
    return _error(error.status_code, str(error.detail), headers=error.headers)


def _error(
    status: int,
    message: str,
    *,
    type: str = "invalid_request_error",
    param: str | None = None,
    code: object = None,
    headers: Mapping[str, str] | None = None,
    beside: Mapping[str, object] | None = None,
) -> JSONResponse:
    fields = {"message": message, "type": type, "param": param, "code": code}
    return JSONResponse({"error": fields, **(beside or {})}, status_code=status, headers=headers)


def _health(app: FastAPI, live: Live) -> None:
    @app.get("/healthz", tags=["health"])
    async def healthz() -> dict[str, str]:
        """This process lives. Says nothing about engines."""
        return {"status": "ok"}

    @app.get("/readyz", tags=["health"], responses=_NOT_READY)
    async def readyz() -> JSONResponse:
        """200 when at least one model has a ready engine, else 503; per model, whether its prompts are read exactly."""
        state = await live.readiness()
        return JSONResponse(state, status_code=200 if state["ready"] else 503)

    @app.get("/metrics", tags=["health"], response_class=PlainTextResponse)
    async def metrics() -> Response:
        """The figures of relay and brain in Prometheus text format."""
        return Response(await live.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _inspection(app: FastAPI, live: Live) -> None:
    @app.get("/admin/v1/fleet", tags=["fleet"])
    async def fleet() -> dict[str, Any]:
        """One row a rank: state and why, load, bookings, index, confidence, hit rate, TTFT."""
        return {"object": "list", "data": await live.fleet()}

    @app.post("/admin/v1/explain", tags=["decisions"], responses=_NO_COMPLETION, openapi_extra=_COMPLETION_BODY)
    async def explain(
        request: Request,
        path: Annotated[Path, Query(description="the route the body is meant for")] = _CHAT,
        tenant: Annotated[str | None, Query(description="whose request it would be: id or name")] = None,
    ) -> dict[str, Any]:
        """Where an OpenAI request body would go now: every candidate with the parts of its cost. Sends nothing."""
        return await live.explain(path, await request.body(), tenant)

    @app.get("/admin/v1/requests", tags=["decisions"])
    async def requests(limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> dict[str, Any]:
        """Receipts of the last requests, newest first."""
        return {"object": "list", "data": (await live.requests(None))[:limit]}

    @app.get("/admin/v1/requests/{request_id}", tags=["decisions"], responses=_NO_RECEIPT)
    async def receipt(request_id: str) -> dict[str, Any]:
        """The receipt of one request: decision, hits predicted and delivered, how it ended."""
        found = await live.requests(request_id)
        if not found:
            raise HTTPException(404, f"no receipt of {request_id!r}: only the last ones are kept")
        return found[0]

    @app.post("/admin/v1/parity", tags=["fleet"])
    async def parity(model: str | None = None) -> dict[str, Any]:
        """Compares our tokens with the engines' own on the probe set again, for one model or all."""
        return {"object": "list", "data": await live.parity(model)}


def _operation(app: FastAPI, live: Live) -> None:
    @app.get("/admin/v1/instances", tags=["instances"])
    async def instances() -> dict[str, Any]:
        """One row an engine: what it serves, its state and why, how many requests run there."""
        return {"object": "list", "data": await live.instances()}

    @app.post("/admin/v1/instances/{instance_id}/drain", tags=["instances"])
    async def drain(instance_id: str) -> dict[str, Any]:
        """No new requests for this engine; those that run go on. Until it is undrained, or the gateway restarts."""
        return await live.drain(instance_id)

    @app.post("/admin/v1/instances/{instance_id}/undrain", tags=["instances"])
    async def undrain(instance_id: str) -> dict[str, Any]:
        """It gets requests again, if it answers its polls. 409 if it is no longer configured."""
        return await live.undrain(instance_id)

    @app.post("/admin/v1/config/reload", tags=["config"], responses={400: {}, 409: {}})
    async def reload() -> JSONResponse:
        """Reads the configuration file again, as SIGHUP does: what changed, and which keys need a restart.

        400 with every mistake and its line if it is not valid; the old one stays in force then.
        """
        answer = await live.reload()
        if "mistakes" not in answer:
            return JSONResponse({"object": "config.reload", **answer})
        message = "The configuration is not valid; the one before stays in force."
        return _error(400, message, code="invalid_config", beside={"mistakes": answer["mistakes"]})


def _trace(app: FastAPI, live: Live) -> None:
    @app.get("/admin/v1/trace", tags=["trace"], response_class=_JsonLines)
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
