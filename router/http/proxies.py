"""Who the client is, where a load balancer stands before us.

A balancer tells in X-Forwarded-For (and X-Forwarded-Proto), or before the first request of a connection in the PROXY
protocol (HAProxy's proxy-protocol.txt, versions 1 and 2). Anybody can write either, so they count only from addresses
that the operator has named. What is found goes to the access log and decides nothing.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterable
from typing import NamedTuple

from router.http.messages import Refusal, Request

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_V1_BYTES = 107  # the longest line of version 1, its end included
_V2_BYTES = 16 + 4096  # far above what balancers add (addresses, and values that we skip)
_V2_SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
_V1_SIGNATURE = b"PROXY "
_LOCAL, _PROXY = 0x20, 0x21  # version 2 and the command: the balancer's own health check, a client's connection
_ADDRESS_BYTES = {1: 4, 2: 16}  # by address family, the high half of a byte


class Client(NamedTuple):
    """address: without a port. scheme: what the client spoke to the balancer, "" if it was not told."""

    address: str
    scheme: str


class TrustedProxies:
    def __init__(self, networks: Iterable[Network]) -> None:
        self._networks = tuple(networks)

    def trusts(self, peer: str) -> bool:
        address = _address(peer)
        return address is not None and any(address in network for network in self._networks)

    def client(self, request: Request) -> Client:
        """The last address that no proxy of ours has vouched for; the peer's if that is no proxy of ours."""
        if not self.trusts(request.peer):
            return Client(request.peer, "")
        found = request.peer
        told = b",".join(value for name, value in request.head if name == b"x-forwarded-for")
        for entry in reversed(told.decode("latin-1").split(",")):
            address = _address(_without_port(entry.strip()))
            if address is None:  # what stands before something unreadable was told by nobody we know
                break
            found = str(address)
            if not self.trusts(found):
                break
        scheme = (request.header(b"x-forwarded-proto") or b"").decode("latin-1").lower()
        return Client(found, scheme if scheme in ("http", "https") else "")


class Preamble(NamedTuple):
    """size: bytes of it. address: the client's, None where the balancer speaks for itself or does not know."""

    size: int
    address: str | None


def read_preamble(data: bytes) -> Preamble | None:
    """The PROXY header that `data` begins with; None if more must come. Raises Refusal for anything else."""
    if data.startswith(_V2_SIGNATURE):
        return _read_v2(data)
    if data.startswith(_V1_SIGNATURE):
        return _read_v1(data)
    if _V2_SIGNATURE.startswith(data) or _V1_SIGNATURE.startswith(data):
        return None
    raise _refusal()


def _read_v1(data: bytes) -> Preamble | None:
    """PROXY TCP4 192.0.2.1 192.0.2.9 51000 443, PROXY UNKNOWN …; ended by CR LF."""
    end = data.find(b"\r\n", 0, _V1_BYTES)
    if end < 0:
        if len(data) >= _V1_BYTES:
            raise _refusal()
        return None
    _, family, *addresses = data[:end].decode("latin-1").split(" ")
    if family == "UNKNOWN":
        return Preamble(end + 2, None)
    address = _address(addresses[0]) if len(addresses) == 4 else None
    if address is None or family != f"TCP{address.version}":
        raise _refusal()
    return Preamble(end + 2, str(address))


def _read_v2(data: bytes) -> Preamble | None:
    if len(data) < 16:
        return None
    command, family, length = struct.unpack_from("!BBH", data, 12)
    if command not in (_LOCAL, _PROXY) or 16 + length > _V2_BYTES:
        raise _refusal()
    if len(data) < 16 + length:
        return None
    size = _ADDRESS_BYTES.get(family >> 4)
    if command == _LOCAL or size is None:
        return Preamble(16 + length, None)
    if length < 2 * size + 4:  # both addresses and both ports
        raise _refusal()
    return Preamble(16 + length, str(ipaddress.ip_address(data[16 : 16 + size])))


def _refusal() -> Refusal:
    return Refusal(400, "The connection does not begin with a PROXY protocol header.")


def _address(text: str) -> Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    # A socket that listens on both families shows IPv4 peers so.
    return address.ipv4_mapped or address if address.version == 6 else address


def _without_port(text: str) -> str:
    """Some balancers write 192.0.2.1:5000 and [2001:db8::1]:5000."""
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0] if text.count(":") == 1 else text
