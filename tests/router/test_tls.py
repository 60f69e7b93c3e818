"""What the configuration says of TLS, and what a failed handshake says."""

from __future__ import annotations

import json
import ssl
from pathlib import Path
from typing import Any

import pytest

from router import config, tls
from router.core import ClientTls
from router.errors import ConfigError, EngineTlsError
from router.tls import BadTlsFile, ServerTls, check_client, check_server, tls_fault
from tests.certificates import Authority, Pair, _openssl, needs_openssl


@pytest.fixture(scope="module")
def pair(ca: Authority) -> Pair:
    return ca.issue("a.test")


def load(tmp_path: Path, **sections: Any) -> config.Config:
    file = tmp_path / "warmroute.yaml"
    file.write_text(json.dumps({"engines": [{"url": "https://a:1"}], **sections}, indent=1))
    return config.load(file, environ={})


def mistakes(tmp_path: Path, **sections: Any) -> list[str]:
    """Without the file; each begins with its line."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, **sections)
    return [mistake.removeprefix(f"{tmp_path / 'warmroute.yaml'}:") for mistake in caught.value.mistakes]


# --- configuration


@needs_openssl
def test_what_an_engine_is_told(tmp_path: Path, ca: Authority, pair: Pair) -> None:
    engines: list[dict[str, Any]] = [
        {"url": "http://a:1"},
        {"url": "https://b:1"},
        {"url": "https://c:1", "tls": {"ca": str(ca.cert), **pair.files, "server_name": "c.test"}},
        {"url": "dns+https://engines.test:1"},
        {"url": "https://d:1", "tls": {"verify": False}},
    ]
    found = load(tmp_path, engines=engines)
    told = [engine.instance(engine="vllm", model="m").tls for engine in found.engines]
    assert told == [
        None,
        ClientTls(),
        ClientTls(str(ca.cert), str(pair.cert), str(pair.key), "c.test"),
        ClientTls(server_name="engines.test"),
        ClientTls(verify=False),
    ]
    assert found.notes == ("INSECURE: d:1 has tls.verify: false, so whoever stands between can read all it is sent",)


@needs_openssl
def test_paths_begin_at_the_file_and_the_key_may_be_with_the_certificate(
    tmp_path: Path, ca: Authority, pair: Pair
) -> None:
    (tmp_path / "both.pem").write_bytes(pair.cert.read_bytes() + pair.key.read_bytes())
    (tmp_path / "ca.pem").write_bytes(ca.cert.read_bytes())
    found = load(tmp_path, listen={"host": "0.0.0.0", "tls": {"cert": "both.pem", "client_ca": "ca.pem"}})
    assert found.listen.tls is not None
    assert found.listen.tls.settings() == ServerTls(str(tmp_path / "both.pem"), None, str(tmp_path / "ca.pem"))
    assert found.notes == ()  # not loopback, but not open to whoever reaches it either


@needs_openssl
def test_every_file_is_tried(tmp_path: Path, ca: Authority, pair: Pair) -> None:
    words, other = tmp_path / "words.pem", ca.issue("b.test")
    words.write_text("nothing of the kind")
    locked = tmp_path / "locked.key"
    _openssl("pkey", "-in", pair.key, "-aes256", "-passout", "pass:x", "-out", locked)
    cert = str(pair.cert)
    engines: list[dict[str, Any]] = [
        {"url": "https://a:1", "tls": {"ca": str(words)}},
        {"url": "https://b:1", "tls": {"cert": cert, "key": str(other.key)}},
        {"url": "https://c:1", "tls": {"cert": cert, "key": str(locked)}},
        {"url": "https://d:1", "tls": {"cert": str(words), "key": str(pair.key)}},
        {"url": "https://e:1", "tls": {"cert": cert}},
        {"url": "https://f:1", "tls": {"key": str(pair.key)}},
        {"url": "https://g:1", "tls": {"ca": str(ca.cert), "verify": False}},
        {"url": "http://h:1", "tls": {"verify": False}},
        {"url": "https://i:1", "tls": {"server_name": "https://i"}},
        {"url": "https://j:1", "tls": {"ca": str(tmp_path / "gone.pem")}},
    ]
    listen = {"tls": {**pair.files, "client_ca": str(words)}}
    found = mistakes(tmp_path, engines=engines, listen=listen, admin={"tls": {"cert": cert}})
    assert sorted(mistake.split(": ", 1)[1] for mistake in found) == [
        "admin.tls.cert: holds no private key that can be read (PEM, without a passphrase)",
        "engines[0].tls.ca: holds no certificate that can be read (PEM)",
        "engines[1].tls.key: holds a key that is not the certificate's",
        "engines[2].tls.key: holds no private key that can be read (PEM, without a passphrase)",
        "engines[3].tls.cert: holds no certificate that can be read (PEM)",
        "engines[4].tls.cert: holds no private key that can be read (PEM, without a passphrase)",
        "engines[5].tls.key: is the key of a certificate: cert is missing",
        "engines[6].tls.verify: is false, so that ca is of no use (leave one of them out)",
        "engines[7].tls: is for an https:// url (and this one is http)",
        "engines[8].tls.server_name: must be a host name or an address, without a port",
        f"engines[9].tls.ca: there is no file {str(tmp_path / 'gone.pem')!r}",
        "listen.tls.client_ca: holds no certificate that can be read (PEM)",
    ]
    assert all(mistake.split(":")[0].isdecimal() for mistake in found)


def test_a_file_that_cannot_be_read_is_named_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(BadTlsFile, match=r"^ca cannot be read: No such file or directory$"):
        check_client(ClientTls(ca=str(tmp_path / "gone")))
    with pytest.raises(BadTlsFile, match=r"^cert cannot be read: Is a directory$"):
        check_server(ServerTls(str(tmp_path)))


# --- files that change


@needs_openssl
async def test_a_changed_file_makes_a_new_context_and_a_bad_one_none(
    tmp_path: Path, ca: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "LOOK_S", 0.0)
    file = tmp_path / "ca.pem"
    settings = ClientTls(ca=str(file))
    with pytest.raises(EngineTlsError) as caught:
        await tls.client_context(settings)
    assert (caught.value.code, caught.value.status) == ("tls_files", 502)
    file.write_bytes(ca.cert.read_bytes())
    first = await tls.client_context(settings)
    file.write_text("half a certif")
    assert await tls.client_context(settings) is first
    assert await tls.client_context(settings) is first
    assert [record.getMessage() for record in caplog.records] == [
        "a changed TLS file is not taken over, the one before stays in use: tls.ca holds no certificate that can be"
        " read (PEM)"
    ]
    file.write_bytes(ca.cert.read_bytes() * 2)
    second = await tls.client_context(settings)
    assert second is not first
    assert await tls.client_context(settings) is second


@needs_openssl
async def test_between_two_looks_nothing_is_read(tmp_path: Path, ca: Authority) -> None:
    file = tmp_path / "ca.pem"
    file.write_bytes(ca.cert.read_bytes())
    settings = ClientTls(ca=str(file))
    first = await tls.client_context(settings)
    file.write_bytes(ca.cert.read_bytes() * 2)
    assert await tls.client_context(settings) is first


def test_what_contexts_agree_to() -> None:
    strict, loose = tls._new_client(ClientTls()), tls._new_client(ClientTls(verify=False))
    assert (strict.verify_mode, strict.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert (loose.verify_mode, loose.check_hostname) == (ssl.CERT_NONE, False)
    assert strict.minimum_version is loose.minimum_version is ssl.TLSVersion.TLSv1_2


# --- words


def _verification(code: int) -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed: 10.0.0.5")
    error.verify_code, error.verify_message = code, "certificate is not valid for '10.0.0.5'"
    return error


def _handshake(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, reason)
    error.reason = reason
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (_verification(10), "tls_verify_failed: the engine's certificate is not accepted: it has expired"),
        (_verification(62), "tls_verify_failed: the engine's certificate is not accepted: it is for another name"),
        (_verification(99), "tls_verify_failed: the engine's certificate is not accepted: X.509 error 99"),
        (_handshake("TLSV13_ALERT_CERTIFICATE_REQUIRED"), "tls_handshake_failed: the engine does not accept us"),
        (_handshake("WRONG_VERSION_NUMBER"), "tls_handshake_failed: the engine does not speak TLS"),
        (_handshake("UNSUPPORTED_PROTOCOL"), "tls_handshake_failed: the engine and we do not agree (unsupported_p"),
    ],
)
def test_a_failed_handshake_in_words_without_a_host(error: Exception, said: str) -> None:
    try:
        try:
            raise error
        except ssl.SSLError as cause:
            raise ConnectionError("https://10.0.0.5") from cause
    except ConnectionError as outer:
        fault = tls_fault(outer)
    assert fault is not None
    assert fault.message.startswith(said)
    assert fault.code == said.partition(":")[0]
    assert "10.0.0.5" not in fault.message + fault.detail


def test_what_has_nothing_to_do_with_tls() -> None:
    assert tls_fault(ConnectionRefusedError(111, "no")) is None
    assert tls_fault(ssl.SSLEOFError(8, "EOF occurred in violation of protocol")) is None
