"""TLS on both sides: every `ssl.SSLContext` is made here, off the loop, and made anew when its files change.

    client_context(settings)   for connections to an engine: relay, control calls, doctor
    ServerContext(settings)    for a listener: the inference API, the admin API

TLS 1.2 at least. ALPN offers http/1.1 and nothing else: there is no HTTP/2 on either side.

Files that cannot be used (a certificate whose key is not written yet) leave things as they are until they change again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import msgspec

from router.core import ClientTls
from router.errors import EngineTlsError

__all__ = ["BadTlsFile", "ClientTls", "ServerContext", "ServerTls", "check_client", "check_server", "client_context",
           "server_name", "tls_fault"]  # fmt: skip

log = logging.getLogger("warmroute.tls")

LOOK_S = 5.0
"""How often the files are looked at."""

_CONTEXTS = 1_000
_SYSTEM = ClientTls()


class ServerTls(msgspec.Struct, frozen=True):
    """What a listener shows, and whom it lets in. Paths of PEM files."""

    cert: str
    key: str | None = None  # None: in the same file as `cert`
    client_ca: str | None = None  # clients must show a certificate that one of these CAs signed


class BadTlsFile(OSError):
    """`key`: the setting whose file cannot be used; `what`: why."""

    def __init__(self, key: str, what: str) -> None:
        super().__init__(f"{key} {what}")
        self.key = key
        self.what = what


Stamp = tuple[tuple[int, int, int] | None, ...]


class _Kept(NamedTuple):
    context: ssl.SSLContext
    stamp: Stamp
    look_at: float  # monotonic


# ---------------------------------------------------------------------------------------------------------------------
# Towards engines

_kept: OrderedDict[ClientTls, _Kept] = OrderedDict()  # the last used last
_lock = threading.Lock()


async def client_context(settings: ClientTls | None) -> ssl.SSLContext:
    """For new connections to an engine; the same object until a file changes. None: the system's CAs, nothing shown.

    Raises EngineTlsError when the files cannot be used.
    """
    settings = settings or _SYSTEM
    kept = _kept.get(settings)
    if kept is not None and time.monotonic() < kept.look_at:
        return kept.context
    return await asyncio.to_thread(_client_context_now, settings)


def _client_context_now(settings: ClientTls) -> ssl.SSLContext:
    with _lock:  # engines that start together share one context, which takes 50 ms with the system's CAs
        kept = _kept.get(settings)
        now = time.monotonic()
        if kept is not None and now < kept.look_at:
            return kept.context
        stamp = _stamp(settings.ca, settings.cert, settings.key)
        if kept is None or kept.stamp != stamp:
            try:
                context = _new_client(settings)
            except BadTlsFile as error:
                if kept is None:
                    raise _fault("tls_files", f"tls.{error}") from None
                _warn_unusable(error)
                context = kept.context
        else:
            context = kept.context
        _kept[settings] = _Kept(context, stamp, now + LOOK_S)
        _kept.move_to_end(settings)
        if len(_kept) > _CONTEXTS:
            _kept.popitem(last=False)
        return context


def _new_client(settings: ClientTls) -> ssl.SSLContext:
    context = _new(ssl.PROTOCOL_TLS_CLIENT)
    if not settings.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif settings.ca is not None:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the CA that signed may be named without its root
        _trust(context, "ca", settings.ca)
    else:
        context.load_default_certs()
    if settings.cert is not None:
        _show(context, settings.cert, settings.key)
    return context


def server_name(settings: ClientTls | None) -> dict[str, str]:
    """httpx's `extensions` for a request to an engine whose certificate carries another name than its url."""
    return {"sni_hostname": settings.server_name} if settings and settings.server_name else {}


def check_client(settings: ClientTls) -> None:
    """Raises BadTlsFile."""
    _new_client(settings)


# ---------------------------------------------------------------------------------------------------------------------
# Towards clients


class ServerContext:
    """`context` stays the listener's for life; connections take the newest one while they shake hands.

    The files are read when it is made, which takes a millisecond or more. Raises BadTlsFile.
    """

    def __init__(self, settings: ServerTls) -> None:
        self._settings = settings
        self._stamp = self._stamp_now()
        self.context = self._newest = _new_server(settings)
        self.context.sni_callback = self._choose

    async def watch(self) -> None:
        """Endless: looks at the files now and then."""
        while True:
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Takes over what has changed. Blocks for as long as reading takes."""
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._newest = _new_server(self._settings)
        except BadTlsFile as error:
            _warn_unusable(error)
        else:
            log.info("new connections are shown the certificate now in %s", self._settings.cert)

    def _stamp_now(self) -> Stamp:
        return _stamp(self._settings.cert, self._settings.key, self._settings.client_ca)

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Called in every handshake, with or without SNI. Loading into the context in use could be seen half done."""
        if self._newest is not self.context:
            connection.context = self._newest


def _new_server(settings: ServerTls) -> ssl.SSLContext:
    context = _new(ssl.PROTOCOL_TLS_SERVER)
    _show(context, settings.cert, settings.key)
    if settings.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        _trust(context, "client_ca", settings.client_ca)
    return context


def check_server(settings: ServerTls) -> None:
    """Raises BadTlsFile."""
    _new_server(settings)


# ---------------------------------------------------------------------------------------------------------------------
# Files


def _new(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _trust(context: ssl.SSLContext, key: str, file: str) -> None:
    _readable(key, file)
    try:
        context.load_verify_locations(file)
    except ssl.SSLError:
        raise BadTlsFile(key, "holds no certificate that can be read (PEM)") from None


def _show(context: ssl.SSLContext, cert: str, key: str | None) -> None:
    _readable("cert", cert)
    if key is not None:
        _readable("key", key)
    try:
        context.load_cert_chain(cert, key, password=_no_passphrase)
    except ssl.SSLError as error:
        raise _blame(error, cert, key) from None


def _blame(error: ssl.SSLError, cert: str, key: str | None) -> BadTlsFile:
    where = "cert" if key is None else "key"
    if error.reason == "KEY_VALUES_MISMATCH":
        return BadTlsFile(where, "holds a key that is not the certificate's")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cert)
    except ssl.SSLError:
        return BadTlsFile("cert", "holds no certificate that can be read (PEM)")
    return BadTlsFile(where, "holds no private key that can be read (PEM, without a passphrase)")


def _no_passphrase() -> str:
    """Without it, OpenSSL would ask for one on the terminal."""
    return ""


def _readable(key: str, file: str) -> None:
    try:
        with Path(file).open("rb"):
            pass
    except OSError as error:
        raise BadTlsFile(key, f"cannot be read: {error.strerror}") from None


def _stamp(*files: str | None) -> Stamp:
    """What changes when a file is written, moved into place, or a link to it (a mounted secret) is turned."""
    return tuple(None if file is None else _stamp_of(file) for file in files)


def _stamp_of(file: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _warn_unusable(error: BadTlsFile) -> None:
    log.warning("a changed TLS file is not taken over, the one before stays in use: tls.%s", error)


# ---------------------------------------------------------------------------------------------------------------------
# What a failed handshake says

_UNKNOWN_CA = "its CA is not known here (name it in tls.ca)"
_VERIFY_WORDS = {  # by X509_V_ERR_…
    9: "it is not valid yet (look at both clocks)",
    10: "it has expired",
    18: "it is self-signed (name it in tls.ca)",
    19: _UNKNOWN_CA,
    20: _UNKNOWN_CA,
    21: _UNKNOWN_CA,
    23: "it is revoked",
    62: "it is for another name (tls.server_name)",
    64: "it is not for this address (tls.server_name)",
}
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")
_REFUSED = ("CERTIFICATE", "UNKNOWN_CA", "HANDSHAKE_FAILURE", "ACCESS_DENIED")


def tls_fault(error: BaseException) -> EngineTlsError | None:
    """What TLS has to do with a failed call to an engine; None: nothing. No message names a host."""
    if isinstance(error, EngineTlsError):
        return error
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            code = getattr(cause, "verify_code", 0)
            words = _VERIFY_WORDS.get(code, f"X.509 error {code}")
            return _fault("tls_verify_failed", f"the engine's certificate is not accepted: {words}")
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError):
            return _fault("tls_handshake_failed", _handshake_words(getattr(cause, "reason", None) or "no reason given"))
        cause = cause.__cause__ or cause.__context__
    return None


def _fault(code: str, words: str) -> EngineTlsError:
    return EngineTlsError(f"{code}: {words}", code=code)


def _handshake_words(reason: str) -> str:
    if reason in _NO_TLS:
        return "the engine does not speak TLS (write http:// in its url)"
    if "ALERT" in reason and any(word in reason for word in _REFUSED):
        return "the engine does not accept us: it may ask for a client certificate (tls.cert)"
    return f"the engine and we do not agree ({reason.lower()})"
