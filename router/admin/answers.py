"""Errors of the admin API: OpenAI's error object, whatever went wrong."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from math import ceil
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from router.errors import WarmrouteError, place_of

log = logging.getLogger("warmroute")

Documented = dict[int | str, dict[str, Any]]

_ERROR = {
    "type": "object",
    "required": ["message", "type", "param", "code"],
    "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": {}, "code": {}},
}
ERROR_ANSWER = {
    "application/json": {"schema": {"type": "object", "required": ["error"], "properties": {"error": _ERROR}}}
}
ANY_ERROR: Documented = {"default": {"description": "an error, as an OpenAI error object", "content": ERROR_ANSWER}}


def render_errors(app: FastAPI) -> None:
    app.exception_handler(WarmrouteError)(_render)
    app.exception_handler(RequestValidationError)(_render_invalid)
    app.exception_handler(StarletteHTTPException)(_render_http)
    app.exception_handler(Exception)(_render_fault)


async def _render(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, WarmrouteError)
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(ceil(error.retry_after_s))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return error_answer(
        error.status, error.message, type=error.type, param=error.param, code=error.code, headers=headers
    )


async def _render_invalid(_: Request, error: Exception) -> JSONResponse:
    """A parameter that does not fit; the first one, if there are several."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    *_, name = first["loc"]
    return error_answer(400, f"{name}: {first['msg']}", param=str(name), code="invalid_parameter")


async def _render_http(_: Request, error: Exception) -> JSONResponse:
    """What routing refuses, and `HTTPException`s."""
    assert isinstance(error, StarletteHTTPException)
    return error_answer(error.status_code, str(error.detail), headers=error.headers)


async def _render_fault(_: Request, error: Exception) -> JSONResponse:
    """A mistake of ours; it is raised again, and so gets into the log (`WithoutTraces`)."""
    return error_answer(500, "Something has gone wrong here.", type="server_error", code="internal_error")


class WithoutTraces:
    """The application as a server runs it, which would log what a mistake of ours says, and that may be SQL or a key.

    It has been answered by then; an answer that broke off is ended by the server.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception as mistake:
            log.error("the admin API failed: %s", place_of(mistake))


def error_answer(
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
