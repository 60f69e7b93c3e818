"""TLS on both sides of the relay: who is let in, what is agreed on, and how connections end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import warnings
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from router import tls
from router.core import ClientTls
from router.errors import EngineTlsError, EngineUnreachable
from router.http.client import Pool, PoolLimits
from router.http.messages import Request
from router.http.responder import Responder
from router.http.server import Limits, Server, serve
from router.tls import ServerContext, ServerTls
from tests.certificates import Authority, Pair, client_context, needs_openssl, server_context, shown_serial
from tests.loops import on_both_loops
from tests.router.http.test_client import Taken

pytestmark = needs_openssl

BIG = bytes(range(256)) * 32768  # 8 MiB: more than the kernel takes for a client that does not read


@pytest.fixture(scope="module")
def shown(ca: Authority) -> Pair:
    return ca.issue("IP:127.0.0.1", "gateway.test")


def handle(request: Request, responder: Responder) -> None:
    if request.path == "/echo":
        responder.send(200, (), request.body)
    elif request.path == "/big":
        responder.send(200, (), BIG)
    elif request.path == "/broken":
        responder.start(200, ())
        responder.write(b"so far")
        responder.abort()
    elif request.path == "/stream":
        responder.start(200, ())
        responder.write(b"one,")
        responder.write(b"two")
        responder.finish()


@contextlib.asynccontextmanager
async def serving(context: ssl.SSLContext, **limits: Any) -> AsyncIterator[Server]:
    server = await serve(handle, tls=context, limits=Limits(**limits))
    yield server
    server.close()


async def exchange(pool: Pool, path: bytes, body: bytes = b"") -> Taken:
    taken = Taken()
    pool.send(b"POST", path, (), body, taken)
    return await taken.done()


async def connected(server: Server, context: ssl.SSLContext) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", server.port, ssl=context)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1_000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came about")


# --- both together


@on_both_loops
async def test_bodies_pass_whole_and_connections_are_used_again(ca: Authority, shown: Pair) -> None:
    async with serving(server_context(shown)) as server:
        pool = Pool(f"https://127.0.0.1:{server.port}", tls=ClientTls(ca=str(ca.cert)))
        for path, body, answer in ((b"/echo", BIG, BIG), (b"/big", b"", BIG), (b"/stream", b"", b"one,two")):
            assert b"".join((await exchange(pool, path, body)).pieces) == answer, path
        assert (pool.stats.opened, pool.stats.reused) == (1, 2)
        broken = await exchange(pool, b"/broken")
        assert (broken.calls[-1], broken.body) == ("error", b"so far")
        await pool.aclose()


@on_both_loops
async def test_a_slow_reader_of_a_last_answer_gets_all_of_it(ca: Authority, shown: Pair) -> None:
    async with serving(server_context(shown)) as server:
        reader, writer = await connected(server, client_context(ca))
        writer.write(b"POST /big HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await until(lambda: bool(server.connections))
        (connection,) = server.connections
        await until(connection._transport.is_closing)
        for _ in range(20):  # past linger_s, within stall_s
            connection.sweep(1.0)
        await reader.readuntil(b"\r\n\r\n")
        body = await reader.read()
        assert len(body) == len(BIG)
        assert body == BIG
        writer.close()


# --- as a server


@on_both_loops
async def test_http_1_1_is_all_that_is_agreed_on(ca: Authority, shown: Pair) -> None:
    async with serving(server_context(shown)) as server:
        for offered, agreed in ((["h2", "http/1.1"], "http/1.1"), (["h2"], None), ([], None)):
            context = client_context(ca)
            if offered:
                context.set_alpn_protocols(offered)
            _, writer = await connected(server, context)
            assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == agreed
            writer.transport.abort()


@on_both_loops
async def test_tls_1_1_is_too_old(ca: Authority, shown: Pair) -> None:
    context = client_context(ca)
    context.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    async with serving(server_context(shown)) as server:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await connected(server, context)


@on_both_loops
async def test_clients_without_a_certificate_of_the_right_ca_are_not_let_in(
    ca: Authority, other_ca: Authority, shown: Pair
) -> None:
    async with serving(server_context(shown, client_ca=ca)) as server:
        url = f"https://127.0.0.1:{server.port}/echo"
        for certificate, is_let_in in ((ca.issue("me"), True), (other_ca.issue("me"), False), (None, False)):
            async with httpx.AsyncClient(trust_env=False, verify=client_context(ca, shows=certificate)) as client:
                if is_let_in:
                    assert (await client.post(url, content=b"hello")).text == "hello"
                else:
                    with pytest.raises(httpx.TransportError):
                        await client.post(url, content=b"hello")


@on_both_loops
async def test_a_renewed_certificate_is_shown_to_new_connections_and_old_ones_live_on(
    ca: Authority, tmp_path: Path
) -> None:
    first, second = ca.issue("IP:127.0.0.1"), ca.issue("IP:127.0.0.1")
    live = Pair(tmp_path / "live.pem", tmp_path / "live.key")
    live.replaced_by(first)
    certificates = ServerContext(ServerTls(**live.files))

    async def serial(writer: asyncio.StreamWriter) -> int:
        return shown_serial(writer.get_extra_info("ssl_object").getpeercert())

    async with serving(certificates.context) as server:
        reader, old = await connected(server, client_context(ca))
        before = await serial(old)
        live.cert.write_bytes(second.cert.read_bytes())  # a key that does not belong to it: not taken over
        certificates.look()
        _, writer = await connected(server, client_context(ca))
        assert await serial(writer) == before
        writer.transport.abort()
        live.replaced_by(second)
        certificates.look()
        _, writer = await connected(server, client_context(ca))
        assert await serial(writer) == before + 1
        writer.transport.abort()
        old.write(b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\nok")
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        old.transport.abort()


@on_both_loops
async def test_files_are_looked_at_again_and_again(
    ca: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "LOOK_S", 0.01)
    live = Pair(tmp_path / "live.pem", tmp_path / "live.key")
    live.replaced_by(ca.issue("IP:127.0.0.1"))
    certificates = ServerContext(ServerTls(**live.files))
    watching = asyncio.create_task(certificates.watch())
    before = certificates._newest
    live.replaced_by(ca.issue("IP:127.0.0.1"))
    await until(lambda: certificates._newest is not before)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


@on_both_loops
async def test_a_refusal_reaches_its_client_and_the_connection_ends(ca: Authority, shown: Pair) -> None:
    async with serving(server_context(shown), linger_s=0.1) as server:
        reader, writer = await connected(server, client_context(ca))
        writer.write(b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: x\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 400")
        await reader.read()
        writer.close()
        await until(lambda: not server.connections)


@on_both_loops
async def test_draining_does_not_wait_for_idle_clients_to_say_goodbye(ca: Authority, shown: Pair) -> None:
    """asyncio closes TLS by asking for the other side's word, and a client's pool does not look at idle connections."""
    async with serving(server_context(shown), linger_s=0.1) as server:
        silent = await asyncio.to_thread(_greeted, server.port, client_context(ca))
        assert await server.drain(30) == 0
        silent.close()


def _greeted(port: int, context: ssl.SSLContext) -> ssl.SSLSocket:
    """A connection over which a request was answered, and that nobody reads any more."""
    connection = context.wrap_socket(socket.create_connection(("127.0.0.1", port)), server_hostname="127.0.0.1")
    connection.sendall(b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\nok")
    assert connection.recv(1000).endswith(b"ok")
    return connection


@on_both_loops
async def test_a_client_that_leaves_frees_the_engine(ca: Authority, shown: Pair) -> None:
    gone = asyncio.Event()

    def wait(_: Request, responder: Responder) -> None:
        responder.on_gone = gone.set

    server = await serve(wait, tls=server_context(shown))
    _, writer = await connected(server, client_context(ca))
    writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n")
    await until(lambda: bool(server.connections))
    writer.close()  # orderly: a close_notify, then the end
    await asyncio.wait_for(gone.wait(), 10)
    server.close()


# --- as a client


async def failure(url: str, settings: ClientTls, **limits: Any) -> EngineUnreachable:
    pool = Pool(url, tls=settings, limits=PoolLimits(**limits))
    error = (await exchange(pool, b"/echo")).error
    await pool.aclose()
    assert isinstance(error, EngineUnreachable)
    assert error.message == "The engine cannot be reached."
    return error


@on_both_loops
async def test_a_certificate_that_is_not_accepted_is_an_engine_that_cannot_be_reached(
    ca: Authority, other_ca: Authority, shown: Pair, tmp_path: Path
) -> None:
    trusted = str(ca.cert)
    async with serving(server_context(shown)) as server:
        url = f"https://127.0.0.1:{server.port}"
        wrong = (ClientTls(ca=str(other_ca.cert)), ClientTls(), ClientTls(ca=trusted, server_name="other.test"))
        for settings in wrong:
            error = await failure(url, settings)
            assert (type(error), error.code) == (EngineTlsError, "tls_verify_failed")
        error = await failure(url, ClientTls(ca=str(tmp_path / "gone.pem")))
        assert (error.code, error.detail) == (
            "tls_files",
            "tls_files: tls.ca cannot be read: No such file or directory",
        )
        assert not server.connections
        right = (ClientTls(ca=trusted), ClientTls(ca=trusted, server_name="gateway.test"), ClientTls(verify=False))
        for settings in right:
            pool = Pool(url, tls=settings)
            assert (await exchange(pool, b"/echo", b"hi")).body == b"hi"
            await pool.aclose()


@on_both_loops
async def test_a_handshake_that_never_ends_counts_as_connecting(ca: Authority) -> None:
    accepted, ended = asyncio.Event(), asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set()
        with contextlib.suppress(ConnectionError):
            while await reader.read(1000):
                pass
        ended.set()
        writer.close()

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    error = await failure(url, ClientTls(ca=str(ca.cert)), connect_s=0.2)
    assert (error.code, accepted.is_set()) == ("engine_unreachable", True)
    await asyncio.wait_for(ended.wait(), 10)
    server.close()


@on_both_loops
async def test_a_body_may_end_with_the_connection(ca: Authority, shown: Pair) -> None:
    async def until_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nall of it")
        writer.close()

    server = await asyncio.start_server(until_close, "127.0.0.1", 0, ssl=server_context(shown))
    pool = Pool(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}", tls=ClientTls(ca=str(ca.cert)))
    whole = await exchange(pool, b"/")
    assert (whole.calls[-1], whole.body) == ("end", b"all of it")
    await pool.aclose()
    server.close()


async def test_engines_with_the_same_settings_share_what_was_read(
    ca: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ClientTls(ca=str(ca.cert))
    contexts = await asyncio.gather(*(tls.client_context(ClientTls(ca=str(ca.cert))) for _ in range(8)))
    assert all(context is contexts[0] for context in contexts)
    monkeypatch.setattr(tls, "LOOK_S", 0.0)
    assert await tls.client_context(settings) is contexts[0]
    assert await tls.client_context(ClientTls(ca=str(ca.cert), verify=False)) is not contexts[0]
