"""What must be refused, sent raw: each is a way to make two readers disagree on where a request ends."""

from __future__ import annotations

import asyncio
import json

import pytest

_HOST = b"Host: a\r\n"
_CHUNKED = _HOST + b"Transfer-Encoding: chunked\r\n"


def _raw(headers: bytes, line: bytes = b"POST / HTTP/1.1", body: bytes = b"") -> bytes:
    return line + b"\r\n" + headers + b"\r\n" + body


REFUSED = {
    # lengths
    "repeated length": (400, _raw(_HOST + b"Content-Length: 5\r\nContent-Length: 5\r\n", body=b"abcde")),
    "conflicting lengths": (400, _raw(_HOST + b"Content-Length: 5\r\nContent-Length: 6\r\n", body=b"abcdef")),
    "length list": (400, _raw(_HOST + b"Content-Length: 5, 5\r\n", body=b"abcde")),
    "signed length": (400, _raw(_HOST + b"Content-Length: +5\r\n", body=b"abcde")),
    "negative length": (400, _raw(_HOST + b"Content-Length: -5\r\n")),
    "hex length": (400, _raw(_HOST + b"Content-Length: 0x5\r\n", body=b"abcde")),
    "empty length": (400, _raw(_HOST + b"Content-Length: \r\n")),
    "overflowing length": (400, _raw(_HOST + b"Content-Length: 99999999999999999999999\r\n")),
    # codings
    "length then coding": (
        400,
        _raw(_HOST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", body=b"0\r\n\r\n"),
    ),
    "coding then length": (400, _raw(_CHUNKED + b"Content-Length: 5\r\n", body=b"0\r\n\r\n")),
    "gzip, chunked": (400, _raw(_HOST + b"Transfer-Encoding: gzip, chunked\r\n", body=b"0\r\n\r\n")),
    "chunked, identity": (400, _raw(_HOST + b"Transfer-Encoding: chunked, identity\r\n", body=b"0\r\n\r\n")),
    "identity": (400, _raw(_HOST + b"Transfer-Encoding: identity\r\n")),
    "xchunked": (400, _raw(_HOST + b"Transfer-Encoding: xchunked\r\n", body=b"0\r\n\r\n")),
    "quoted chunked": (400, _raw(_HOST + b'Transfer-Encoding: "chunked"\r\n', body=b"0\r\n\r\n")),
    "vertical tab chunked": (400, _raw(_HOST + b"Transfer-Encoding: \x0bchunked\r\n", body=b"0\r\n\r\n")),
    "empty coding": (400, _raw(_HOST + b"Transfer-Encoding: \r\n")),
    "repeated coding": (400, _raw(_CHUNKED + b"Transfer-Encoding: chunked\r\n", body=b"0\r\n\r\n")),
    "coding in HTTP/1.0": (400, _raw(_CHUNKED, b"POST / HTTP/1.0", b"0\r\n\r\n")),
    # chunks
    "chunk size not hex": (400, _raw(_CHUNKED, body=b"0x5\r\nabcde\r\n0\r\n\r\n")),
    "chunk size negative": (400, _raw(_CHUNKED, body=b"-1\r\nabcde\r\n0\r\n\r\n")),
    "chunk size empty": (400, _raw(_CHUNKED, body=b"\r\nabcde\r\n0\r\n\r\n")),
    "chunk size with space": (400, _raw(_CHUNKED, body=b"5 \r\nabcde\r\n0\r\n\r\n")),
    "chunk size overflowing": (400, _raw(_CHUNKED, body=b"FFFFFFFFFFFFFFFFF\r\nabcde\r\n0\r\n\r\n")),
    "chunk size ended by LF": (400, _raw(_CHUNKED, body=b"5\nabcde\r\n0\r\n\r\n")),
    "chunk size ended by CR": (400, _raw(_CHUNKED, body=b"5\r\rabcde\r\n0\r\n\r\n")),
    "chunk longer than said": (400, _raw(_CHUNKED, body=b"5\r\nabcdefg\r\n0\r\n\r\n")),
    "chunk ended by LF": (400, _raw(_CHUNKED, body=b"5\r\nabcde\n0\r\n\r\n")),
    "LF in chunk extension": (400, _raw(_CHUNKED, body=b"5;a=b\nc\r\nabcde\r\n0\r\n\r\n")),
    "malformed trailer": (400, _raw(_CHUNKED, body=b"0\r\nTrailer 1\r\n\r\n")),
    # lines
    "bare LF everywhere": (400, b"GET / HTTP/1.1\nHost: a\n\n"),
    "bare LF after the request line": (400, b"GET / HTTP/1.1\nHost: a\r\n\r\n"),
    "bare LF after a header": (400, b"GET / HTTP/1.1\r\nHost: a\nX: b\r\n\r\n"),
    "bare LF at the end": (400, b"GET / HTTP/1.1\r\nHost: a\r\n\n"),
    "bare CR in a value": (400, b"GET / HTTP/1.1\r\nHost: a\r\nX: b\rc\r\n\r\n"),
    "bare CR after the request line": (400, b"GET / HTTP/1.1\rHost: a\r\n\r\n"),
    "folded line": (400, _raw(_HOST + b"X: a\r\n b\r\n")),
    "line folded with a tab": (400, _raw(_HOST + b"X: a\r\n\tb\r\n")),
    "folded empty value": (400, _raw(_HOST + b"X:\r\n b\r\n")),
    "space before the first header": (400, _raw(b" Host: a\r\n")),
    # headers
    "space before the colon": (400, _raw(_HOST + b"X : a\r\n")),
    "tab before the colon": (400, _raw(_HOST + b"X\t: a\r\n")),
    "space before the colon of a coding": (400, _raw(_HOST + b"Transfer-Encoding : chunked\r\n")),
    "empty name": (400, _raw(_HOST + b": a\r\n")),
    "no colon": (400, _raw(_HOST + b"X\r\n")),
    "delimiter in a name": (400, _raw(_HOST + b"X(: a\r\n")),
    "NUL in a name": (400, _raw(_HOST + b"X\x00: a\r\n")),
    "byte above ASCII in a name": (400, _raw(_HOST + b"X\x80: a\r\n")),
    "NUL in a value": (400, _raw(_HOST + b"X: a\x00b\r\n")),
    "control byte in a value": (400, _raw(_HOST + b"X: a\x01b\r\n")),
    "DEL in a value": (400, _raw(_HOST + b"X: a\x7fb\r\n")),
    "no Host": (400, _raw(b"X: a\r\n")),
    "two Hosts": (400, _raw(_HOST + _HOST)),
    "two Hosts in HTTP/1.0": (400, _raw(_HOST + _HOST, b"GET / HTTP/1.0")),
    "Host with a path": (400, _raw(b"Host: a/b\r\n")),
    "Host with user": (400, _raw(b"Host: u@a\r\n")),
    "Host list": (400, _raw(b"Host: a b\r\n")),
    "unknown expectation": (417, _raw(_HOST + b"Expect: 200-ok\r\nContent-Length: 1\r\n")),
    # request line
    "HTTP/1.2": (505, _raw(_HOST, b"GET / HTTP/1.2")),
    "HTTP/2.0": (505, _raw(_HOST, b"GET / HTTP/2.0")),
    "HTTP/2 preface": (505, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "HTTP/0.9": (505, _raw(_HOST, b"GET / HTTP/0.9")),
    "no version": (505, b"GET /\r\n\r\n"),
    "lower-case protocol": (400, _raw(_HOST, b"GET / http/1.1")),
    "space after the version": (400, _raw(_HOST, b"GET / HTTP/1.1 ")),
    "tab after the method": (400, _raw(_HOST, b"GET\t/ HTTP/1.1")),
    "space in the target": (400, _raw(_HOST, b"GET /a b HTTP/1.1")),
    "control byte in the target": (400, _raw(_HOST, b"GET /\x01 HTTP/1.1")),
    "byte above ASCII in the target": (400, _raw(_HOST, b"GET /\x80 HTTP/1.1")),
    "fragment": (400, _raw(_HOST, b"GET /#f HTTP/1.1")),
    "no slash": (400, _raw(_HOST, b"GET x HTTP/1.1")),
    "star for GET": (400, _raw(_HOST, b"GET * HTTP/1.1")),
    "absolute target with user": (400, _raw(_HOST, b"GET http://u@a/ HTTP/1.1")),
    "absolute target of another scheme": (400, _raw(_HOST, b"GET ftp://a/ HTTP/1.1")),
    "unknown method": (400, _raw(_HOST, b"BREW / HTTP/1.1")),
    "lower-case method": (400, _raw(_HOST, b"get / HTTP/1.1")),
    "CONNECT": (405, _raw(_HOST, b"CONNECT a:1 HTTP/1.1")),
    "RTSP method": (405, _raw(_HOST, b"ANNOUNCE / RTSP/1.0")),
    "garbage": (400, b"\x16\x03\x01\x02\x00\x01\x00"),
    # sizes
    "oversized value, whole": (431, _raw(_HOST + b"X: " + b"a" * 70_000 + b"\r\n")),
    "oversized value, never ending": (431, b"GET / HTTP/1.1\r\nX: " + b"a" * 600_000),
    "oversized name, never ending": (431, b"GET / HTTP/1.1\r\n" + b"a" * 600_000),
    "many headers": (431, _raw(_HOST + b"X: a\r\n" * 100)),
    "long target": (414, _raw(_HOST, b"GET /" + b"a" * 17_000 + b" HTTP/1.1")),
    "long target, never ending": (414, b"GET /" + b"a" * 600_000),
    "large body announced": (413, _raw(_HOST + b"Content-Length: 100001\r\n")),
    "large body in chunks": (413, _raw(_CHUNKED, body=b"C350\r\n" + b"a" * 50_000 + b"\r\nC351\r\n" + b"a" * 50_001)),
    "trailer never ending": (431, _raw(_CHUNKED, body=b"0\r\nX: " + b"a" * 600_000)),
    "chunk extension never ending": (431, _raw(_CHUNKED, body=b"5;x=" + b"a" * 600_000)),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_refused(case, start, dial):
    status, raw = REFUSED[case]
    handled = []
    server = await start(lambda request, responder: handled.append(request), body_bytes=100_000)
    wire = await dial(server)
    wire.send(raw)
    head = await wire.until(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"\r\nconnection: close\r\n" in head
    error = json.loads(await wire.to_end())["error"]
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    assert handled == []
    assert server.refused == {status: 1}


ACCEPTED = {
    "plain": (b"GET / \n", _raw(_HOST, b"GET / HTTP/1.1")),
    "empty lines before": (b"GET / \n", b"\r\n\r\n" + _raw(_HOST, b"GET / HTTP/1.1")),
    "query": (b"GET /a%2Fb c=d?e\n", _raw(_HOST, b"GET /a%2Fb?c=d?e HTTP/1.1")),
    "absolute target": (b"GET /a b\n", _raw(_HOST, b"GET http://other:80/a?b HTTP/1.1")),
    "absolute target without path": (b"GET / \n", _raw(_HOST, b"GET HTTP://other HTTP/1.1")),
    "server-wide options": (b"OPTIONS * \n", _raw(_HOST, b"OPTIONS * HTTP/1.1")),
    "length": (b"POST / \nabcde", _raw(_HOST + b"Content-Length: 5\r\n", body=b"abcde")),
    "length with space after": (b"POST / \nabcde", _raw(_HOST + b"Content-Length: 5 \t\r\n", body=b"abcde")),
    "no length": (b"POST / \n", _raw(_HOST)),
    "chunks": (b"POST / \nabcdefg", _raw(_CHUNKED, body=b"5\r\nabcde\r\n02;x=y\r\nfg\r\n0\r\n\r\n")),
    "Chunked in capitals": (
        b"POST / \n",
        _raw(_HOST + b"Transfer-Encoding: Chunked\r\n", body=b"0\r\n\r\n"),
    ),
    "trailers": (b"POST / \na", _raw(_CHUNKED, body=b"1\r\na\r\n0\r\nHost: evil\r\nX: y\r\n\r\n")),
    "IPv6 host": (b"GET / \n", _raw(b"Host: [::1]:4000\r\n", b"GET / HTTP/1.1")),
    "empty host": (b"GET / \n", _raw(b"Host:\r\n", b"GET / HTTP/1.1")),
    "a hundred headers": (b"GET / \n", _raw(_HOST + b"X: a\r\n" * 99, b"GET / HTTP/1.1")),
    "bytes above ASCII in a value": (b"GET / \n", _raw(_HOST + b"X: \xff\r\n", b"GET / HTTP/1.1")),
    "upgrade ignored": (
        b"POST / \nabc",
        _raw(_HOST + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nContent-Length: 3\r\n", body=b"abc"),
    ),
}


@pytest.mark.parametrize("case", ACCEPTED)
async def test_accepted_and_the_next_request_too(case, start, dial):
    expected, raw = ACCEPTED[case]
    wire = await dial(await start())
    wire.send(raw + _raw(_HOST, b"GET /next HTTP/1.1"))
    assert (await wire.answer())[1] == expected
    assert (await wire.answer())[1] == b"GET /next \n"


async def test_the_authority_of_an_absolute_target_replaces_host(start, dial):
    def handler(request, responder):
        responder.send(200, [], request.header(b"host"))

    wire = await dial(await start(handler))
    wire.send(_raw(_HOST, b"GET http://other:80/ HTTP/1.1"))
    assert (await wire.answer())[1] == b"other:80"


async def test_header_names_are_lower_case_and_trailers_are_not_headers(start, dial):
    seen = []

    def handler(request, responder):
        seen.extend(request.headers)
        responder.send(200, [], b"")

    wire = await dial(await start(handler))
    wire.send(_raw(_CHUNKED + b"X-A:  b \t\r\n", body=b"1\r\na\r\n0\r\nX-Trailer: y\r\n\r\n"))
    await wire.answer()
    assert seen == [(b"host", b"a"), (b"transfer-encoding", b"chunked"), (b"x-a", b"b")]


async def test_a_refusal_is_read_even_while_the_client_still_sends(start, dial):
    wire = await dial(await start(body_bytes=1000))
    wire.send(_raw(_HOST + b"Content-Length: 3000000\r\n", body=b"a" * 3_000_000))
    assert (await wire.to_end()).startswith(b"HTTP/1.1 413 ")


async def test_a_refusal_waits_for_the_answers_before_it(start, dial):
    handed = asyncio.get_running_loop().create_future()
    wire = await dial(await start(lambda request, responder: handed.set_result(responder)))
    wire.send(_raw(_HOST, b"GET / HTTP/1.1") + b"garbage\r\n\r\n")
    (await handed).send(200, [], b"first")
    answer = await wire.to_end()
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\n\r\nfirstHTTP/1.1 400 Bad Request\r\n" in answer
