"""The sections of the two ports."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import ByteSize, Field

from router.config.accounts import AdminAuth
from router.config.section import Section, text
from router.config.values import KIB, MIB, File, ForwardedHeader, Network, Port, Seconds, Size, Text
from router.tls import ServerTls


class Cors(Section):
    origins: tuple[Text, ...] = ()
    """Browser origins that may call the API, e.g. https://chat.example.com; "*" for any. None by default."""


class Drain(Section):
    """What SIGTERM begins. /readyz says 503 at once, so that balancers send their requests elsewhere."""

    accept_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 5.0
    """So long, seconds, new connections and requests are still taken: until every balancer has noticed."""
    finish_s: Seconds = 120.0
    """So long after the signal, seconds, running requests go on; those that are left end with an error. Whoever sent
    the signal must wait longer than this before it kills (Kubernetes: terminationGracePeriodSeconds, by default 30)."""


class ListenTls(Section):
    """TLS 1.2 or newer on a port of ours. A certificate that is written anew is taken up within seconds."""

    cert: File
    """The certificate with its chain, PEM. An ECDSA key signs ten times as fast as an RSA one, in every handshake."""
    key: File | None = None
    """Its private key, PEM, without a passphrase; by default it is in the same file."""
    client_ca: File | None = None
    """Clients must show a certificate that a CA in this file, PEM, has signed. By default none is asked for."""

    def settings(self) -> ServerTls:
        return ServerTls(str(self.cert), text(self.key), text(self.client_ca))


class Listen(Section):
    """The inference API: what clients take as base_url."""

    host: Text = "127.0.0.1"
    """Address to listen on. Beyond loopback requests need keys (auth.mode)."""
    port: Port = 4000
    """TCP port; 0 takes a free one."""
    tls: ListenTls | None = None
    """Makes it https://. Plain http by default."""
    cors: Cors = Cors()
    """Calls from browsers."""
    access_log: bool = False
    """One line a request on standard error, with the client's address. Never the prompt."""
    trusted_proxies: tuple[Network, ...] = ()
    """Addresses or networks of the load balancers before us, e.g. 10.0.0.0/8. What they say of a client in
    X-Forwarded-For and X-Forwarded-Proto goes to the access log; from anybody else it is ignored."""
    proxy_protocol: bool = False
    """Connections of trusted_proxies begin with the PROXY protocol (version 1 or 2), those of others do not."""
    forward_headers: tuple[ForwardedHeader, ...] = ()
    """Headers of clients that engines get as they came, besides traceparent and tracestate; e.g. baggage."""
    max_connections: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """So many clients may be connected; further ones are answered with 503 and Retry-After, and closed, so that a
    balancer or SDK tries another gateway. Each takes an open file, and one more while an engine answers it."""
    max_body_bytes: Size = ByteSize(64 * MIB)
    """A larger request body is refused with 413, as it came and after decompression."""
    max_head_bytes: Size = ByteSize(64 * KIB)
    """A request with a larger head is refused with 431."""
    max_headers: Annotated[int, Field(ge=1, le=10_000)] = 100
    """A request with more headers is refused with 431."""
    head_s: Seconds = 30.0
    """A request head that has not come whole by then is refused with 408, seconds from its first byte."""
    body_idle_s: Seconds = 30.0
    """A request body of which nothing has come for so long is refused with 408, seconds."""
    body_bytes_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1024.0
    """So many bytes of body prolong its time by a second: it may take that and body_idle_s, else 408."""
    keep_alive_s: Seconds = 75.0
    """How long an idle client connection is kept open, seconds."""
    stalled_reader_s: Seconds = 60.0
    """A client that takes nothing of its answer for so long is dropped and its engine freed, seconds."""
    drain: Drain = Drain()
    """How the gateway ends."""
    receipts: bool = False
    """Adds x-warmroute-instance, the name of the engine that answered. It shows how requests are placed, so leave it
    off where clients must not learn of each other. The token counts are there in any case:
    x-warmroute-predicted-tokens, and x-warmroute-cached-tokens on an answer that is no stream if the engine told it."""


class Admin(Section):
    """Metrics, readiness, explain and the live view."""

    host: Text = "127.0.0.1"
    """Address to listen on. Beyond loopback it asks for an admin key (auth)."""
    port: Port = 4001
    """TCP port; 0 takes a free one."""
    tls: ListenTls | None = None
    """Makes it https://. With client_ca it has a login of a kind."""
    auth: AdminAuth = AdminAuth()
    """Who may use it."""
    enabled: bool = True
    """False: no admin API; the inference port is all there is."""


def asks_for_certificates(tls: ListenTls | None) -> bool:
    return tls is not None and tls.client_ca is not None


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
