"""Kinds of values in the configuration: what each accepts, and how it says no.

A message completes the sentence that starts with the key: "engines[0].url: must end after the port (…)".
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, ByteSize, Field, SecretStr, ValidationInfo, WithJsonSchema

from router.core import Rates

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

RATE_PROFILES: Mapping[str, Rates] = {
    "llama-3.1-8b-h100": Rates(c0_ms=6.66, c1_ms=0.01983, n0_tokens=192, c2_ms=7.95e-7, c3_ms=4.2e-5, c4_ms=0.005),
    "llama-3.1-8b-h200": Rates(c0_ms=5.22, c1_ms=0.0205, n0_tokens=192, c2_ms=8.04e-7, c3_ms=2.96e-5, c4_ms=0.006),
    "llama-3.1-70b-tp4-h100": Rates(c0_ms=15.8, c1_ms=0.0607, n0_tokens=128, c2_ms=1e-6, c3_ms=2.65e-5, c4_ms=0.008),
    "llama-3.1-70b-tp8-h100": Rates(c0_ms=10.3, c1_ms=0.0377, n0_tokens=64, c2_ms=5.02e-7, c3_ms=1.34e-5, c4_ms=0.0),
}
"""Priors of the step time, bf16 on vLLM 0.24: fitted to the operator tables of aiconfigurator-core 0.12."""

_HEADER = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,128}\Z")
_CREDENTIALS = frozenset(("api-key", "authorization", "cookie", "x-api-key"))
_NEVER_FORWARDED = frozenset((
    "api-key", "authorization", "connection", "cookie", "expect", "forwarded", "host", "keep-alive", "te", "trailer",
    "transfer-encoding", "upgrade", "x-api-key", "x-data-parallel-rank", "x-goog-api-key", "x-real-ip", "x-request-id",
))  # fmt: skip
_NAME = re.compile(r"[\w-]{1,63}(\.[\w-]{1,63}){0,31}\Z", re.ASCII)
_ID = re.compile(r"[\w.:\[\]@-]{1,128}\Z", re.ASCII)


def _existing(path: Path, info: ValidationInfo) -> Path:
    base = (info.context or {}).get("base", Path())
    found: Path = base / path.expanduser()
    if not found.is_file():
        raise ValueError(f"there is no file {str(found)!r}")
    return found


def _tokenizer(text: str, info: ValidationInfo) -> str:
    """Makes the path in it absolute: relative ones start at the configuration file."""
    if text in ("demo", "engine", "none"):
        return text
    base = (info.context or {}).get("base", Path())
    if text.startswith("tiktoken:"):
        encoding, at, file = text.removeprefix("tiktoken:").partition("@")
        if not (encoding and at and file):
            raise ValueError("must be tiktoken:NAME@FILE, e.g. tiktoken:cl100k_base@ranks.tiktoken")
        return f"tiktoken:{encoding}@{_existing(Path(file), info)}"
    directory: Path = base / Path(text).expanduser()
    if not (directory / "tokenizer.json").is_file():
        raise ValueError(
            f"there is no tokenizer.json in {str(directory)!r} (nothing is downloaded at run time: "
            "fetch the model's files once and give their directory; or write engine, demo or none)"
        )
    return str(directory)


def _engine_url(text: str) -> str:
    scheme, _, rest = text.partition("://")
    parts = urlsplit(f"//{rest}")
    try:
        port = parts.port
    except ValueError:
        raise ValueError("has a port that is not a number up to 65535") from None
    if scheme not in ("http", "https", "dns+http", "dns+https") or not parts.hostname:
        raise ValueError("must be http://HOST:PORT, or dns+http://NAME:PORT for a headless service")
    if parts.username or parts.password:
        raise ValueError("must not carry a user or password (put the engine's key into api_key)")
    if parts.path.rstrip("/") or parts.query or parts.fragment:
        raise ValueError("must end after the port (paths such as /v1 are added by the gateway)")
    if parts.hostname in ("0.0.0.0", "::"):
        raise ValueError("is an address to listen on, not to connect to (write the engine's own host)")
    if scheme.startswith("dns+") and port is None:
        raise ValueError("needs a port: dns+http://NAME:PORT")
    return f"{scheme}://{parts.netloc.lower()}"


def _event_endpoint(text: str) -> str:
    if not re.match(r"(tcp://[^/]+:\d+|ipc://.+)\Z", text):
        raise ValueError("must be tcp://HOST:PORT or ipc://PATH")
    if re.match(r"tcp://(\*|0\.0\.0\.0|\[::\]|::):", text):
        raise ValueError(
            "is the address the engine binds; the gateway needs one to connect to (write the engine's host)"
        )
    return text


def _network(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text))
    except ValueError as error:
        raise ValueError(f"must be an address or a network such as 10.0.0.0/8: {error}") from None


def _header(text: str) -> str:
    name = text.lower()
    if not _HEADER.match(name):
        raise ValueError("is not the name of a header")
    return name


def _identity_header(text: str) -> str:
    name = _header(text)
    if name in _CREDENTIALS:
        raise ValueError("holds keys (the name of a tenant comes in a header of its own, e.g. x-tenant-id)")
    return name


def _forwarded(text: str) -> str:
    name = _header(text)
    if name in _NEVER_FORWARDED or name.startswith(("proxy-", "x-forwarded-", "content-", "accept")):
        raise ValueError("is never sent to engines: it is the connection's, a credential, or written by the gateway")
    return name


def _server_name(text: str) -> str:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        if not _NAME.match(text):
            raise ValueError("must be a host name or an address, without a port") from None
    return text


def _profile(name: str) -> str:
    if name not in RATE_PROFILES:
        raise ValueError(f"is not one of {', '.join(RATE_PROFILES)}")
    return name


def _identifier(text: str) -> str:
    if not _ID.match(text):
        raise ValueError("may have letters, digits and . : @ _ - only, at most 128")
    return text


def _database_url(url: SecretStr) -> SecretStr:
    if not re.match(r"(sqlite:///.|postgres(ql)?://)", url.get_secret_value()):
        raise ValueError("must be sqlite:///PATH or postgresql://USER:PASSWORD@HOST:PORT/NAME")
    return url


_SIZE_SCHEMA = {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}], "examples": ["256MiB"]}

Size = Annotated[ByteSize, Field(gt=0), WithJsonSchema(_SIZE_SCHEMA)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Port = Annotated[int, Field(ge=0, le=65535)]
Network = Annotated[str, AfterValidator(_network)]
HeaderOfIdentity = Annotated[str, AfterValidator(_identity_header)]
DatabaseUrl = Annotated[SecretStr, AfterValidator(_database_url)]
LongSecret = Annotated[SecretStr, Field(min_length=32)]
ForwardedHeader = Annotated[str, AfterValidator(_forwarded)]
Tokens = Annotated[int, Field(gt=0)]
Text = Annotated[str, Field(min_length=1)]
File = Annotated[Path, AfterValidator(_existing)]
Tokenizer = Annotated[str, AfterValidator(_tokenizer)]
EngineUrl = Annotated[str, AfterValidator(_engine_url)]
ServerName = Annotated[str, AfterValidator(_server_name)]
EventEndpoint = Annotated[str, AfterValidator(_event_endpoint)]
RateProfile = Annotated[str, AfterValidator(_profile)]
Identifier = Annotated[str, AfterValidator(_identifier)]
