"""Certificates for tests, made with the openssl command: nothing secret is kept anywhere."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from router.tls import ServerContext, ServerTls

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command is not installed")


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=20)


class Pair:
    """A certificate and its key."""

    def __init__(self, cert: Path, key: Path) -> None:
        self.cert = cert
        self.key = key

    @property
    def files(self) -> dict[str, str]:
        """As the configuration takes them."""
        return {"cert": str(self.cert), "key": str(self.key)}

    def replaced_by(self, other: Pair) -> None:
        """As a renewal does it: the new files are moved over the old ones."""
        for old, new in ((self.cert, other.cert), (self.key, other.key)):
            copy = old.with_suffix(".new")
            copy.write_bytes(new.read_bytes())
            os.replace(copy, old)


class Authority(Pair):
    """A CA of a test's own."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder / f"{name}.pem", folder / f"{name}.key")
        self._folder = folder
        self._name = name
        self._issued = 0
        new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        may = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")  # Python 3.13 and later ask for it
        named = ("-subj", f"/CN={name}", "-days", "2")
        _openssl("req", "-x509", *new_key, *may, *named, "-keyout", self.key, "-out", self.cert)

    def issue(self, *names: str) -> Pair:
        """For host names; an address is written "IP:127.0.0.1"."""
        self._issued += 1
        stem = self._folder / f"{self._name}-{self._issued}"
        pair = Pair(stem.with_suffix(".pem"), stem.with_suffix(".key"))
        request, extension = stem.with_suffix(".csr"), stem.with_suffix(".ext")
        alternatives = ",".join(name if ":" in name else f"DNS:{name}" for name in names)
        extension.write_text(f"subjectAltName={alternatives}\nauthorityKeyIdentifier=keyid\n")
        new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        _openssl("req", "-new", *new_key, "-subj", f"/CN={names[0]}", "-keyout", pair.key, "-out", request)
        signed = ("-CA", self.cert, "-CAkey", self.key, "-set_serial", str(self._issued + 1), "-days", "2")
        _openssl("x509", "-req", "-in", request, *signed, "-extfile", extension, "-out", pair.cert)
        return pair


def server_context(pair: Pair, *, client_ca: Pair | None = None) -> ssl.SSLContext:
    """Of an engine in a test."""
    return ServerContext(ServerTls(**pair.files, client_ca=str(client_ca.cert) if client_ca else None)).context


def client_context(ca: Pair, *, shows: Pair | None = None) -> ssl.SSLContext:
    """Of a client in a test."""
    context = ssl.create_default_context(cafile=str(ca.cert))
    if shows is not None:
        context.load_cert_chain(shows.cert, shows.key)
    return context


def shown_serial(certificate: dict[str, Any] | None) -> int:
    assert certificate is not None
    return int(certificate["serialNumber"], 16)
