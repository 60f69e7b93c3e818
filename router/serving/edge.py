"""HTTP in, HTTP out: the routes of the inference API, and what goes with every answer.

POST  what goes to an engine: `apis/__init__.py`     GET  /v1/models   /v1/models/{id}   /healthz   /readyz
"""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any
from urllib.parse import unquote

from router.core import OPEN, Caller
from router.errors import (
    BadRequest,
    BodyTooLarge,
    MethodNotAllowed,
    RequestTimeout,
    RoomFull,
    ShuttingDown,
    UnknownRoute,
    WarmrouteError,
)
from router.http.messages import Header, Headers, Refusal, Request, header_lines
from router.serving.apis import APIS, OPENAI, ROUTES, Api
from router.serving.apis.responses import NOT_STORED
from router.serving.gateway import Gateway
from router.serving.models import Models
from router.serving.reply import Reply, Responder, content_lines
from router.serving.run import Run

Identify = Callable[[Request], Caller]
"""Who asks (`serving/identity.py`). Raises Unauthenticated and StoreUnavailable."""
Account = Callable[[Request], Awaitable[tuple[int, bytes, bytes]]]
"""Answers for accounts, elsewhere: status, content type, body."""
Readiness = Callable[[], Awaitable[Mapping[str, Any]]]
"""`core.Live.readiness`: {"ready": bool, …per model}."""

_SANE_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}").fullmatch
_MODELS = "/v1/models/"
_FULL_RETRY_S = 1.0
_REFUSALS: Mapping[int, Callable[[str], WarmrouteError]] = {
    408: RequestTimeout,
    413: BodyTooLarge,
    503: partial(RoomFull, retry_after_s=_FULL_RETRY_S),
}
_SHUTDOWN_RETRY_S = 1.0
_ENDED_AT_ONCE = 20
_EXPOSED = (
    b"x-request-id, request-id, retry-after, x-warmroute-attempts, "
    b"x-warmroute-predicted-tokens, x-warmroute-cached-tokens, x-warmroute-instance, x-should-retry, "
    b"x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    b"x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)
_TOLD_TO_ALL = ("ready", "draining")
_PREFLIGHT: tuple[Header, ...] = (
    (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
    (b"access-control-max-age", b"600"),
)


class Edge:
    """The handler of the HTTP server: called once for each whole request, on the loop.

    `identify`: who asks; None: nobody is asked who they are. `origins`: the browser origins that may call, `"*"` for
    any; none by default.
    """

    def __init__(
        self,
        gateway: Gateway,
        models: Models,
        *,
        readiness: Readiness,
        identify: Identify | None = None,
        origins: Iterable[str] = (),
    ) -> None:
        self._gateway = gateway
        self._identify = identify
        self._models = models
        self._readiness = readiness
        self._origins = frozenset(origin.encode() for origin in origins)
        self._ids = map(f"{secrets.token_hex(6)}{{:08x}}".format, itertools.count(1))
        self._runs: set[Run] = set()
        self._end = self._runs.discard
        self._ending = False
        self._routes: dict[str, tuple[str, Callable[[Request, Reply], None]]] = {
            "/healthz": ("GET", self._healthz),
            "/readyz": ("GET", self._readyz),
        }
        for path, upstream in ROUTES.items():
            self._routes[path] = ("POST", partial(self._complete, upstream, APIS[upstream]))
        for prefix in ("/v1", ""):
            self._routes[prefix + "/models"] = ("GET", self._list_models)

    def offer_accounts(self, account: Account, routes: Mapping[str, str]) -> None:
        """`routes`: path -> method."""
        for path, method in routes.items():
            self._routes[path] = (method, partial(self._relay_account, account))

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return len(self._runs)

    async def end_all(self) -> int:
        """End what runs, as the gateway is going: before its answer has begun with 503, after that with an error event.
        The same from now on for what was read already.

        Returns how many requests that were.
        """
        self._ending = True
        runs = list(self._runs)
        for count, run in enumerate(runs, 1):
            run.cancel(_shutting_down())
            if count % _ENDED_AT_ONCE == 0:
                await asyncio.sleep(0)
        return len(runs)

    def __call__(self, request: Request, responder: Responder) -> None:
        reply = self._reply(request.named, responder)
        method = request.method
        try:
            known, handler = self._routes.get(request.path) or self._route_of_card(request.path)
            if method == known or (method == "HEAD" and known == "GET"):
                handler(request, reply)
            elif method == "OPTIONS":
                self._preflight(request, reply)
            else:
                raise MethodNotAllowed(f"Use {known} for this route.")
        except WarmrouteError as error:
            reply.api = APIS.get(ROUTES.get(request.path, ""), OPENAI)
            reply.fail(error)

    def refuse(self, request: Request, responder: Responder, refusal: Refusal) -> None:
        """Answer a request that the HTTP server turns away; it has read the head, and may not have the whole body."""
        reply = self._reply(request.named, responder)
        reply.api = APIS.get(ROUTES.get(request.path, ""), OPENAI)
        error: WarmrouteError = _REFUSALS.get(refusal.status, BadRequest)(refusal.message)
        if request.path not in ROUTES:
            reply.fail(error)
            return
        caller = OPEN
        try:
            caller = self._caller(request)
        except WarmrouteError as stranger:
            error = stranger
        self._gateway.refuse(request, reply, error, caller)

    def _route_of_card(self, path: str) -> tuple[str, Callable[[Request, Reply], None]]:
        if path.removeprefix("/v1").startswith("/responses/"):
            raise UnknownRoute(NOT_STORED)
        full = path if path.startswith("/v1/") else "/v1" + path
        if not full.startswith(_MODELS):
            raise UnknownRoute("There is no such route.")
        return "GET", partial(self._show_model, unquote(full.removeprefix(_MODELS)))

    def _reply(self, headers: Headers, responder: Responder) -> Reply:
        """An id that a client brings is the one it will ask about, so it is kept if it is sane; engines get our own."""
        request_id = serial = next(self._ids)
        shown = upstream_id = request_id.encode()
        theirs = headers.get(b"x-request-id")
        if theirs is not None and _SANE_ID(theirs):
            request_id, shown, upstream_id = theirs.decode(), theirs, b"%b-%b" % (upstream_id, theirs)
        lines = b"\r\nx-request-id: " + shown
        if self._origins and (origin := headers.get(b"origin")) is not None:
            lines += header_lines(self._cors(origin))
        return Reply(responder, lines, request_id, upstream_id, serial)

    def _cors(self, origin: bytes) -> tuple[Header, ...]:
        vary = (b"vary", b"origin")
        if origin not in self._origins and b"*" not in self._origins:
            return (vary,)
        return (vary, (b"access-control-allow-origin", origin), (b"access-control-expose-headers", _EXPOSED))

    # -- routes

    def _complete(self, path: str, api: Api, request: Request, reply: Reply) -> None:
        reply.api = api
        if api.id_header:
            reply.lines += b"\r\n%b: %b" % (api.id_header, reply.request_id.encode())
        try:
            caller = self._caller(request)
        except WarmrouteError as error:
            self._gateway.refuse(request, reply, error)
            return
        self._run(self._gateway.complete(request, reply, path, caller), reply)

    def _caller(self, request: Request) -> Caller:
        return OPEN if self._identify is None else self._identify(request)

    def _relay_account(self, account: Account, request: Request, reply: Reply) -> None:
        self._run(self._say_account(account, request, reply), reply)

    async def _say_account(self, account: Account, request: Request, reply: Reply) -> None:
        try:
            status, content_type, body = await asyncio.ensure_future(account(request))
        except WarmrouteError as error:
            reply.fail(error)
        else:
            reply.whole(status, content_lines(content_type), body)

    def _list_models(self, request: Request, reply: Reply) -> None:
        reply.json(self._models.listing(self._caller(request).models))

    def _show_model(self, name: str, request: Request, reply: Reply) -> None:
        reply.json(self._models.card(name, self._caller(request).models))

    def _healthz(self, request: Request, reply: Reply) -> None:
        reply.json({"status": "ok"})

    def _readyz(self, request: Request, reply: Reply) -> None:
        self._run(self._say_readiness(reply, whole=self._is_open(request)), reply)

    def _is_open(self, request: Request) -> bool:
        """Where tenants have keys, the state of the fleet is not for everybody."""
        try:
            return self._caller(request) is OPEN
        except WarmrouteError:
            return False

    async def _say_readiness(self, reply: Reply, *, whole: bool) -> None:
        try:
            state = await asyncio.ensure_future(self._readiness())
        except WarmrouteError as error:
            reply.fail(error)
        else:
            told = state if whole else {key: state[key] for key in _TOLD_TO_ALL if key in state}
            reply.json(dict(told), status=200 if state["ready"] else 503)

    def _preflight(self, request: Request, reply: Reply) -> None:
        asked = request.header(b"access-control-request-headers")
        if b"\r\naccess-control-allow-origin: " in reply.lines:
            allowed = () if asked is None else ((b"access-control-allow-headers", asked),)
            reply.lines += header_lines((*_PREFLIGHT, *allowed))
        reply.empty(204)

    # -- runs

    def _run(self, work: Coroutine[Any, Any, None], reply: Reply) -> None:
        """A client that leaves ends it."""
        run = Run(work, self._end)
        self._runs.add(run)
        reply.responder.on_gone = run.cancel
        run.step()
        if self._ending:
            run.cancel(_shutting_down())


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("The gateway is shutting down; try again.", retry_after_s=_SHUTDOWN_RETRY_S)
