"""Control calls to engines: one client an engine, foreign errors translated here and nowhere else.

No message names a host, a path with secrets, or a key; where it went wrong is in `detail`, for the operator's log.
"""

from __future__ import annotations

import json
import ssl
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import httpx
import orjson

from router.core import Instance
from router.errors import EngineProtocolError, EngineTimeout, EngineUnreachable
from router.tls import client_context, server_name, tls_fault

_TIMEOUT = httpx.Timeout(5.0, connect=2.0)
_LIMITS = httpx.Limits(max_connections=20, max_keepalive_connections=4, keepalive_expiry=30)
_CLIENTS = 2_000
_ABSENT = frozenset((404, 405, 501))


_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For http: trusts nobody. By default httpx reads certificates for every client, 50 ms on the loop."""


class _Client:
    """An engine's own: a pool that all share is searched through for every request (200 engines: 6 ms each)."""

    __slots__ = ("http", "retired", "running", "tls")

    def __init__(self, http: httpx.AsyncClient, tls: ssl.SSLContext) -> None:
        self.http = http
        self.tls = tls
        self.running = 0  # calls
        self.retired = False  # closed by whoever uses it last

    async def retire(self) -> None:
        self.retired = True
        if not self.running:
            await self.http.aclose()


class EngineHttp:
    """`transport`: for tests, in place of the network."""

    def __init__(self, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._transport = transport
        self._clients: OrderedDict[str, _Client] = OrderedDict()  # by URL, the last used last

    async def aclose(self) -> None:
        while self._clients:
            await self._clients.popitem()[1].http.aclose()

    async def _take(self, instance: Instance) -> _Client:
        """With one more `running`. A new one when the certificates have changed. Raises EngineTlsError."""
        url, tls = instance.url, _NO_TLS
        if url.startswith("https:"):
            tls = await client_context(instance.tls)
        client = self._clients.get(url)
        if client is not None and client.tls is tls:
            self._clients.move_to_end(url)
            client.running += 1
            return client
        # Engines are addressed by the operator: a proxy from the environment must not come between.
        http = httpx.AsyncClient(
            timeout=_TIMEOUT, limits=_LIMITS, transport=self._transport, verify=tls, trust_env=False
        )
        self._clients[url] = made = _Client(http, tls)
        self._clients.move_to_end(url)
        made.running += 1
        if client is not None:
            await client.retire()
        if len(self._clients) > _CLIENTS:
            await self._clients.popitem(last=False)[1].retire()  # of an engine long gone
        return made

    async def status(self, instance: Instance, path: str, *, with_key: bool = True) -> int:
        return (await self._send("GET", instance, path, with_key=with_key)).status_code

    async def page(self, instance: Instance, path: str, *, timeout_s: float | None = None) -> bytes | None:
        """The body of a 200; None where the engine has no such route."""
        response = await self._send("GET", instance, path, timeout_s=timeout_s)
        if response.status_code in _ABSENT:
            return None
        if response.status_code != 200:
            raise _refused(response.status_code, path)
        return response.content

    async def json(self, instance: Instance, path: str) -> Any:
        """The JSON of a 200; None where the engine has no such route."""
        body = await self.page(instance, path)
        return None if body is None else _parse(body, path)

    async def post(
        self,
        instance: Instance,
        path: str,
        body: Mapping[str, Any],
        *,
        headers: Iterable[tuple[bytes, bytes]] = (),
        timeout_s: float | None = None,
    ) -> Any:
        """The JSON of the answer to a JSON body; None where the engine has no such route."""
        response = await self._send("POST", instance, path, content=_dump(body), headers=headers, timeout_s=timeout_s)
        if response.status_code in _ABSENT:
            return None
        if response.status_code != 200:
            raise _refused(response.status_code, path)
        return _parse(response.content, path)

    async def _send(
        self,
        method: str,
        instance: Instance,
        path: str,
        *,
        content: bytes | None = None,
        with_key: bool = True,
        headers: Iterable[tuple[bytes, bytes]] = (),
        timeout_s: float | None = None,
    ) -> httpx.Response:
        lines = [*headers]
        if content is not None:
            lines.append((b"content-type", b"application/json"))
        if instance.api_key is not None and with_key:
            lines.append((b"authorization", b"Bearer " + instance.api_key.encode()))
        client = await self._take(instance)
        try:
            return await client.http.request(
                method,
                instance.url + path,
                content=content,
                headers=lines,
                timeout=_TIMEOUT if timeout_s is None else timeout_s,
                extensions=server_name(instance.tls),
            )
        except httpx.TimeoutException as error:
            raise EngineTimeout("the engine did not answer in time", detail=_where(instance, path, error)) from None
        except (httpx.TransportError, httpx.InvalidURL, ssl.SSLError) as error:
            raise _unreachable(instance, path, error) from None
        except httpx.HTTPError as error:
            raise EngineProtocolError("the engine's answer is broken", detail=_where(instance, path, error)) from None
        finally:
            client.running -= 1
            if client.retired and not client.running:
                await client.http.aclose()


def _unreachable(instance: Instance, path: str, error: Exception) -> EngineUnreachable:
    fault = tls_fault(error)
    if fault is not None:
        return fault
    message = "the engine cannot be reached"
    if instance.url.startswith("https:") and not isinstance(error, httpx.ConnectError):
        # TLS 1.3 refuses a client's certificate after the handshake, and few servers get to say so.
        message = "the engine ends connections unanswered: it may ask for another client certificate (tls.cert)"
    return EngineUnreachable(message, detail=_where(instance, path, error))


def _where(instance: Instance, path: str, error: Exception) -> str:
    return f"{instance.id} {path}: {type(error).__name__}"


def _refused(status: int, path: str) -> EngineProtocolError:
    reason = "refused our key" if status in (401, 403) else "answered an error"
    return EngineProtocolError(f"the engine {reason}", detail=f"{path}: HTTP {status}")


def _dump(body: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError:  # half a surrogate pair, which clients do send: only the standard library writes it
        return json.dumps(body).encode()


def _parse(body: bytes, path: str) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        raise EngineProtocolError("the engine's answer is not JSON", detail=path) from None
