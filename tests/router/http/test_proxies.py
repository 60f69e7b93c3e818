"""Who the client is behind a load balancer: X-Forwarded-For and the PROXY protocol, from named peers only."""

from __future__ import annotations

import ipaddress
import logging
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.messages import Limits, Refusal, Request
from router.http.proxies import Client, Preamble, TrustedProxies, read_preamble
from router.http.server import serve

_GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
_LOOPBACK = TrustedProxies([ipaddress.ip_network("127.0.0.0/8")])
_NOBODY = TrustedProxies([ipaddress.ip_network("192.0.2.0/24")])


def v2(family: int, addresses: bytes, *, command: int = 0x21, more: bytes = b"") -> bytes:
    return b"\r\n\r\n\0\r\nQUIT\n" + struct.pack("!BBH", command, family, len(addresses + more)) + addresses + more


_V2_IPV4 = v2(0x11, bytes([203, 0, 113, 9, 10, 0, 0, 1]) + struct.pack("!HH", 51000, 443))
_V2_IPV6 = v2(
    0x21,
    ipaddress.ip_address("2001:db8::9").packed + ipaddress.ip_address("::1").packed + struct.pack("!HH", 51000, 443),
    more=b"\x04\x00\x03abc",
)
_PREAMBLES = {
    b"PROXY TCP4 203.0.113.9 10.0.0.1 51000 443\r\n": "203.0.113.9",
    b"PROXY TCP6 2001:db8::9 ::1 51000 443\r\n": "2001:db8::9",
    b"PROXY UNKNOWN\r\n": None,
    b"PROXY UNKNOWN ff::1 ff::2 1 2\r\n": None,
    _V2_IPV4: "203.0.113.9",
    _V2_IPV6: "2001:db8::9",
    v2(0x11, b"", command=0x20): None,
    v2(0x00, b"", command=0x21): None,
    v2(0x31, bytes(216), command=0x21): None,  # a Unix socket's
}


# -- X-Forwarded-For


def request(peer: str, *headers: tuple[bytes, bytes]) -> Request:
    named = dict(reversed(headers))
    return Request("GET", "/", query=b"", head=headers, named=named, body=b"", peer=peer)


@pytest.mark.parametrize(
    ("peer", "told", "found"),
    [
        ("198.51.100.7", [b"203.0.113.9"], "198.51.100.7"),  # no proxy of ours
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", [b"203.0.113.9"], "203.0.113.9"),
        ("10.0.0.1", [b"6.6.6.6, 203.0.113.9"], "203.0.113.9"),  # what the client made up stands before
        ("10.0.0.1", [b"6.6.6.6, 203.0.113.9, 10.0.0.2"], "203.0.113.9"),
        ("10.0.0.1", [b"6.6.6.6", b"203.0.113.9"], "203.0.113.9"),
        ("10.0.0.1", [b"10.0.0.3, 10.0.0.2"], "10.0.0.3"),
        ("10.0.0.1", [b"203.0.113.9, unknown"], "10.0.0.1"),
        ("10.0.0.1", [b"203.0.113.9, unknown, 10.0.0.2"], "10.0.0.2"),
        ("10.0.0.1", [b"203.0.113.9:4711"], "203.0.113.9"),
        ("10.0.0.1", [b"[2001:db8::9]:4711"], "2001:db8::9"),
        ("::ffff:10.0.0.1", [b"2001:db8::9"], "2001:db8::9"),
        ("", [b"203.0.113.9"], ""),  # a Unix socket
    ],
)
def test_the_client_is_the_last_address_that_no_proxy_of_ours_stands_for(peer, told, found):
    proxies = TrustedProxies([ipaddress.ip_network("10.0.0.0/8")])
    headers = [(b"x-forwarded-for", value) for value in told]
    assert proxies.client(request(peer, *headers)).address == found


def test_the_scheme_is_a_trusted_proxys_word():
    told = (b"x-forwarded-proto", b"HTTPS")
    assert _LOOPBACK.client(request("127.0.0.1", told)) == Client("127.0.0.1", "https")
    assert _NOBODY.client(request("127.0.0.1", told)) == Client("127.0.0.1", "")
    assert _LOOPBACK.client(request("127.0.0.1", (b"x-forwarded-proto", b"gopher"))).scheme == ""


# -- the PROXY protocol


@pytest.mark.parametrize(("data", "address"), _PREAMBLES.items())
def test_a_preamble_is_read_however_it_is_cut(data, address):
    for end in range(len(data)):
        assert read_preamble(data[:end]) is None
    assert read_preamble(data) == read_preamble(data + _GET) == Preamble(len(data), address)


@given(st.sampled_from([*_PREAMBLES, b""]), st.integers(0, 240), st.binary(max_size=120))
def test_arbitrary_bytes_are_a_preamble_or_refused(start, cut, rest):
    data = start[:cut] + rest
    try:
        found = read_preamble(data)
    except Refusal:
        return
    assert found is None or 0 < found.size <= len(data)
    assert found is not None or len(data) < 16 + 4096


@pytest.mark.parametrize(
    "data",
    [
        _GET,
        b"PROXX",
        b"PROXY TCP4 203.0.113.9 10.0.0.1 51000\r\n",
        b"PROXY TCP4 2001:db8::9 ::1 51000 443\r\n",
        b"PROXY TCP4 example.com 10.0.0.1 51000 443\r\n",
        b"PROXY TCP5 203.0.113.9 10.0.0.1 51000 443\r\n",
        b"PROXY TCP4 203.0.113.9 10.0.0.1 51000 443\n" + b"x" * 107,
        v2(0x11, b"1234"),
        v2(0x11, _V2_IPV4[16:], command=0x31),
        v2(0x11, _V2_IPV4[16:], command=0x22),
        v2(0x11, _V2_IPV4[16:], more=bytes(5000)),
    ],
)
async def test_what_is_no_preamble_is_refused_from_who_must_send_one(data, dial):
    server = await serve(lambda request, responder: responder.send(200, [], b"served"), behind=_LOOPBACK)
    wire = await dial(server)
    wire.send(data)
    assert (await wire.to_end()).startswith(b"HTTP/1.1 400 ")
    assert server.refused == {400: 1}
    server.close()


@pytest.mark.parametrize("cut", [1, 30, 1000])
@pytest.mark.parametrize(("data", "address"), _PREAMBLES.items())
async def test_the_peer_is_the_one_that_the_preamble_names(data, address, cut, dial):
    server = await serve(lambda request, responder: responder.send(200, [], request.peer.encode()), behind=_LOOPBACK)
    wire = await dial(server)
    sent = data + _GET
    for start in range(0, len(sent), cut):
        wire.send(sent[start : start + cut])
        await wire.writer.drain()
    expected = (address or "127.0.0.1").encode()
    assert (await wire.answer())[1] == expected
    wire.send(_GET)  # a known head, too
    assert (await wire.answer())[1] == expected
    server.close()


async def test_from_anybody_else_a_preamble_is_no_request(dial):
    server = await serve(lambda request, responder: responder.send(200, [], request.peer.encode()), behind=_NOBODY)
    wire = await dial(server)
    wire.send(_GET)
    assert (await wire.answer())[1] == b"127.0.0.1"
    wire.send(b"PROXY TCP4 203.0.113.9 10.0.0.1 51000 443\r\n" + _GET)
    assert (await wire.to_end()).startswith(b"HTTP/1.1 400 ")
    server.close()


async def test_a_preamble_has_as_much_time_as_a_head(dial):
    server = await serve(
        lambda request, responder: responder.send(200, [], b""), behind=_LOOPBACK, limits=Limits(head_s=0.05)
    )
    wire = await dial(server)
    wire.send(b"PROXY ")
    assert await wire.to_end() == b""
    server.close()


async def test_no_address_is_in_what_is_logged_of_a_refusal(dial, caplog):
    server = await serve(lambda request, responder: responder.send(200, [], b""), behind=_LOOPBACK)
    wire = await dial(server)
    with caplog.at_level(logging.INFO):
        wire.send(b"PROXY TCP4 203.0.113.9 10.0.0.1 51000 443\r\ngarbage\r\n\r\n")
        assert (await wire.to_end()).startswith(b"HTTP/1.1 400 ")
    assert "refused a request with 400" in caplog.text
    assert "203.0.113.9" not in caplog.text
    assert "127.0.0.1" not in caplog.text
    server.close()
