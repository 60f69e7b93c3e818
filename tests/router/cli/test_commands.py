"""The commands as people type them: output, exit codes, what is said on standard error."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import router
from router.cli import main
from router.config import Config

GOOD = "engines: [{url: http://127.0.0.1:8000}]\npolicy: {name: policies.lmetric:LMetric}\n"


class Shell:
    """Runs a command line; keeps what was printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        self.out, self.err = self._capsys.readouterr()
        return int(ended.value.code or 0)


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(capsys)


def _write(text: str) -> Path:
    file = Path("warmroute.yaml")
    file.write_text(text)
    return file


def test_help_and_version(shell: Shell) -> None:
    assert shell("--help") == 0
    for command in ("serve", "demo", "check", "doctor", "explain", "sim-engine"):
        assert f"\n  {command} " in shell.out
    assert "Exit codes: 0" in shell.out
    assert shell("--version") == 0
    assert shell.out.strip() == router.__version__


@pytest.mark.parametrize("command", ["serve", "demo", "check", "doctor", "explain", "sim-engine"])
def test_every_command_explains_itself_and_its_options(shell: Shell, command: str) -> None:
    assert shell(command, "--help") == 0
    assert shell.out.count("\n") > 8


def test_an_unknown_command_is_a_usage_error(shell: Shell) -> None:
    assert shell("sevre") == 2
    assert "No such command 'sevre'" in shell.err


class TestCheck:
    def test_a_good_file(self, shell: Shell) -> None:
        _write(GOOD)
        assert shell("check") == 0
        assert shell.out == "ok: 1 engine(s), models as the engines list them, policy policies.lmetric:LMetric\n"

    def test_every_mistake_plugins_included(self, shell: Shell) -> None:
        file = _write(GOOD + "models:\n  a: {policy: policies.lmetric:LMetrik}\n  b: {parity: x}\n")
        assert shell("check", "-c", str(file)) == 1
        assert shell.out.splitlines() == [
            "warmroute.yaml:4: models.a.policy: 'policies.lmetric:LMetrik': module 'policies.lmetric' has no 'LMetrik' "
            "(did you mean 'LMetric'?)",
            "warmroute.yaml:5: models.b.parity: must be 'enforce', 'warn' or 'off'",
        ]

    def test_weights_that_the_policy_refuses(self, shell: Shell) -> None:
        _write("engines: [{url: http://a:1}]\npolicy:\n  name: policies.kv_aware:KvAware\n  weights: {nonsense: 1}\n")
        assert shell("check") == 1
        assert shell.out.startswith("warmroute.yaml:4: policy.weights: ")
        assert "nonsense" in shell.out

    def test_notes_are_no_mistakes(self, shell: Shell) -> None:
        _write(GOOD + "listen: {host: 0.0.0.0}")
        assert shell("check") == 0
        assert "note: listen.host 0.0.0.0 is not loopback" in shell.out

    def test_as_json(self, shell: Shell) -> None:
        _write("engines: 3")
        assert shell("check", "--json", "-") == 1
        assert json.loads(shell.out) == {
            "ok": False,
            "mistakes": ["warmroute.yaml:1: engines: must be a list"],
            "notes": [],
        }

    def test_schema(self, shell: Shell) -> None:
        assert shell("check", "--schema") == 0
        assert json.loads(shell.out)["properties"]["engines"]

    def test_no_file_named_and_none_there(self, shell: Shell) -> None:
        assert shell("check") == 2
        assert "there is no ./warmroute.yaml" in shell.err


class TestServe:
    @pytest.fixture
    def served(self, monkeypatch: pytest.MonkeyPatch) -> list[Config]:
        """Configurations handed to the gateway, in place of running it, and what they are when read again."""
        configs: list[Config] = []

        def run(config: Config, *, read_again: Callable[[], Config] | None) -> None:
            configs.append(config)
            if read_again is not None:
                configs.append(read_again())

        app = ModuleType("router.app")
        app.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "router.app", app)
        return configs

    def test_flags_over_the_file(self, shell: Shell, served: list[Config]) -> None:
        _write(GOOD + "listen: {port: 4100, host: localhost}")
        assert shell("serve", "--port", "4200") == 0
        assert (served[0].listen.port, served[0].listen.host) == (4200, "localhost")
        assert served[1] == served[0]

    def test_without_a_file(self, shell: Shell, served: list[Config]) -> None:
        arguments = ["--engine", "http://a:1", "--engine", "http://b:1", "--policy", "policies.lmetric:LMetric"]
        assert shell("serve", *arguments, "--tokenizer", "demo", "--host", "0.0.0.0") == 0
        assert [engine.url for engine in served[0].engines] == ["http://a:1", "http://b:1"]
        assert "note: listen.host 0.0.0.0 is not loopback" in shell.err
        assert len(served) == 1  # there is no file to read again

    def test_mistakes_end_it_before_it_starts(self, shell: Shell, served: list[Config]) -> None:
        assert shell("serve", "--engine", "a:1", "--port", "-1") == 2
        assert [line.split(": ")[0] for line in shell.err.splitlines()] == ["--port", "--engine"]
        assert served == []

    def test_file_and_engines_together(self, shell: Shell) -> None:
        file = _write(GOOD)
        assert shell("serve", "-c", str(file), "--engine", "http://a:1") == 2
        assert "not both" in shell.err


DECISION: dict[str, Any] = {
    "request": {"model": "m", "tokens": 5000, "turn": 3, "prompt_source": "exact", "reason": ""},
    "policy": "kv_aware",
    "candidates": [
        {
            "cost": {"value": 12.5, "parts": {"queue": 2.5, "prefill": 10.0}, "unit": "ms"},
            "instance": "[::1]:8000",
            "rank": 0,
            "hit_tokens": 4096,
            "confidence": 1.0,
            "booked_requests": 2,
            "running": 3,
            "waiting": 4,
        }
    ],
    "filtered": {"b/0": "excluded"},
    "reason": "a reason",
}


class Gateway(BaseHTTPRequestHandler):
    """The admin API's explain route, as far as the command sees it."""

    status, answer = 200, b""
    asked: tuple[str, bytes] = ("", b"")

    def do_POST(self) -> None:
        type(self).asked = (self.path, self.rfile.read(int(self.headers["content-length"])))
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *_: object) -> None:
        pass


class TestExplain:
    @pytest.fixture
    def gateway(self) -> Iterator[str]:
        with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            yield f"http://127.0.0.1:{server.server_port}"
            server.shutdown()
            thread.join()

    @pytest.fixture(autouse=True)
    def body(self, shell: Shell) -> bytes:
        body = b'{"model": "m", "messages": []}'
        Path("body.json").write_bytes(body)
        Gateway.status, Gateway.answer = 200, json.dumps(DECISION).encode()
        return body

    def test_every_candidate_with_its_parts(self, shell: Shell, gateway: str, body: bytes) -> None:
        assert shell("explain", "body.json", "--url", gateway) == 0
        assert Gateway.asked == ("/admin/v1/explain?path=%2Fv1%2Fchat%2Fcompletions", body)
        assert shell("explain", "body.json", "--url", gateway, "--tenant", "acme") == 0
        assert Gateway.asked == ("/admin/v1/explain?path=%2Fv1%2Fchat%2Fcompletions&tenant=acme", body)
        assert "m: 5,000 tokens, turn 3, read exact" in shell.out
        for cell in (
            "[::1]:8000/0",
            "12.5",
            "queue",
            "2.5",
            "prefill",
            "10.0",
            "4,096",
        ):
            assert cell in shell.out
        assert "left out: b/0: excluded" in shell.out
        assert "note: a reason" in shell.out

    def test_as_json_only(self, shell: Shell, gateway: str) -> None:
        assert shell("explain", "body.json", "--url", gateway, "--json", "-") == 0
        assert json.loads(shell.out) == DECISION

    def test_the_gateway_of_a_configuration(self, shell: Shell, gateway: str) -> None:
        _write(GOOD + f"admin: {{port: {gateway.rpartition(':')[2]}}}")
        assert shell("explain", "body.json", "-c", "warmroute.yaml") == 0

    def test_a_refusal_in_the_gateways_words(self, shell: Shell, gateway: str) -> None:
        Gateway.status, Gateway.answer = 404, b'{"error": {"message": "no model named x"}}'
        assert shell("explain", "body.json", "--url", gateway) == 1
        assert shell.err == "warmroute: no model named x\n"

    def test_nobody_there(self, shell: Shell) -> None:
        assert shell("explain", "body.json", "--url", "http://127.0.0.1:1") == 1
        assert "no gateway answers at http://127.0.0.1:1" in shell.err

    def test_a_body_that_is_not_there(self, shell: Shell) -> None:
        assert shell("explain", "nothing.json") == 2
        assert "nothing.json: No such file" in shell.err
