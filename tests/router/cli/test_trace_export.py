"""`warmroute trace export`: what a gateway has served becomes a trace that the reader takes and that names nothing."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from router import config
from router.app import Running
from router.cli import main
from router.lab.arms import Arm
from router.lab.compare import compare
from router.lab.fleet_model import EngineSpec
from router.lab.options import SimEngineOptions
from router.lab.profiles import PROFILES
from router.lab.replay import Setup
from router.lab.server import SimEngineServer
from router.lab.traces import read_trace

VLLM = "adapters.vllm:VllmAdapter"  # by module, so that the test needs no installed package


def line(at_ms: float, tokens: int, *blocks: int, **more: Any) -> dict[str, Any]:
    about = {"model": "m", "instance": "10.0.0.1:8000", "stream": True, "turn": 1, "block_size": 64}
    return {"timestamp": at_ms, "input_length": tokens, "output_length": 5, "hash_ids": list(blocks)} | about | more


class Admin(BaseHTTPRequestHandler):
    """The admin API's trace route, as far as the command sees it."""

    status: ClassVar[int] = 200
    answer: ClassVar[bytes] = b""
    asked: ClassVar[dict[str, list[str]]] = {}

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        assert parts.path == "/admin/v1/trace"
        type(self).asked = parse_qs(parts.query)
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def admin() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Admin) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def answers(*lines: dict[str, Any], status: int = 200) -> None:
    Admin.status, Admin.answer = status, b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def export(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["trace", "export", *arguments])
    return int(ended.value.code or 0)


def written(file: Path) -> list[dict[str, Any]]:
    data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    return [json.loads(row) for row in data.splitlines()]


def test_arrivals_and_names_begin_at_nothing(admin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "load.jsonl.gz"
    answers(  # in the order in which they ended
        line(1_700_000_001_500.0, 200, 2**64 - 1, 10**19, 7, session=2**63, tenant=5, turn=2),
        line(1_700_000_000_000.0, 128, 2**64 - 1, 10**19, session=2**63, stream=False),
        line(1_700_000_002_000.0, 130, 7, 7 * 10**18, session=9),
    )
    assert export("--admin", f"{admin}/", "-o", str(file)) == 0
    common = {"block_size": 64, "output_length": 5}
    assert [row | common for row in written(file)] == written(file)
    assert [{name: value for name, value in row.items() if name not in common} for row in written(file)] == [
        {"timestamp": 0, "input_length": 128, "hash_ids": [0, 1], "turn": 1, "stream": False, "session": 0},
        {
            "timestamp": 1500,
            "input_length": 200,
            "hash_ids": [0, 1, 2, 3],  # the last one is partial
            "turn": 2,
            "stream": True,
            "session": 0,
            "tenant": 0,
        },
        {"timestamp": 2000, "input_length": 130, "hash_ids": [2, 4, 5], "turn": 1, "stream": True, "session": 1},
    ]
    assert "3 requests in 2 s, 458 prompt tokens, blocks of 64\n" in capsys.readouterr().out


def test_the_trace_reader_takes_it_as_it_is(admin: str, tmp_path: Path) -> None:
    file = tmp_path / "load.jsonl"
    answers(line(5_000.0, 200, 1, 2, 3, session=4, tenant=6), line(6_000.0, 64, 1, session=4, turn=2, tenant=8))
    assert export("--admin", admin, "-o", str(file)) == 0
    trace = read_trace(file)
    first, second = trace.requests
    assert (trace.block_size, first.at, second.at) == (64, 0.0, 1.0)
    assert (list(first.blocks), list(second.blocks)) == ([0, 1, 2, 3], [0])
    assert (first.session, first.turn, first.tenant) == ("0", 1, "0")
    assert (second.session, second.turn, second.tenant) == ("0", 2, "1")
    assert read_trace(file, speed=2).requests[1].at == 0.5


def test_blocks_that_were_not_known_are_shared_with_nobody(
    admin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "load.jsonl"
    answers(line(0.0, 256, 1, 2), line(1.0, 256, block_size=None), line(2.0, 256, 1, 2, 3, 4))
    assert export("--admin", admin, "-o", str(file)) == 0
    assert [row["hash_ids"] for row in written(file)] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 8, 9]]
    assert "6 of 12 blocks were not known, and count as shared with nobody" in capsys.readouterr().out


def test_a_trace_has_one_block_size(admin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "load.jsonl"
    answers(line(0.0, 96, 1, block_size=96), line(1.0, 64, 2), line(2.0, 64, 3), line(3.0, 64, block_size=None))
    assert export("--admin", admin, "-o", str(file)) == 0
    assert [(row["timestamp"], row["block_size"]) for row in written(file)] == [(0, 64), (1, 64), (2, 64)]
    assert "left out, since a trace has one block size: 1 in blocks of 96;" in capsys.readouterr().out


def test_since_and_model_are_asked_for(admin: str, tmp_path: Path) -> None:
    answers(line(0.0, 64, 1))
    file = str(tmp_path / "load.jsonl")
    assert export("--admin", admin, "-o", file) == 0
    assert Admin.asked == {}
    before = time.time()
    assert export("--admin", admin, "-o", file, "--model", "m&n", "--since", "1.5h") == 0
    assert Admin.asked["model"] == ["m&n"]
    assert before - 5_400 <= float(Admin.asked["since"][0]) <= time.time() - 5_400
    assert export("--admin", admin, "-o", file, "--since", "2026-01-31T12:00+00:00") == 0
    assert float(Admin.asked["since"][0]) == 1_769_860_800.0


class TestMistakes:
    def test_a_time_that_is_none(self, admin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert export("--admin", admin, "-o", str(tmp_path / "x"), "--since", "yesterday") == 2
        assert capsys.readouterr().err == (
            "--since yesterday: it has to be like 30m, 2h or 1d, or a date and time like 2026-01-31T12:00\n"
        )

    def test_a_time_before_time(self, admin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert export("--admin", admin, "-o", str(tmp_path / "x"), "--since", "99999999d") == 2
        assert capsys.readouterr().err.startswith("--since 99999999d: ")

    def test_nothing_served(self, admin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        answers()
        assert export("--admin", admin, "-o", str(tmp_path / "x")) == 1
        assert "has kept no such request" in capsys.readouterr().err
        assert not (tmp_path / "x").exists()

    def test_nobody_there(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert export("--admin", "http://127.0.0.1:9", "-o", str(tmp_path / "x")) == 1
        assert "no gateway answers at http://127.0.0.1:9" in capsys.readouterr().err

    @pytest.mark.parametrize("url", ["http://[::1", "not a url"])
    def test_no_address(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str) -> None:
        assert export("--admin", url, "-o", str(tmp_path / "x")) == 1
        assert "no gateway answers at" in capsys.readouterr().err

    @pytest.mark.parametrize("body", [b"<html>", b'{"ok": true}\n', json.dumps(line(0.0, 64, 2**64)).encode()])
    def test_somebody_else_there(
        self, admin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], body: bytes
    ) -> None:
        answers()
        Admin.answer = body
        assert export("--admin", admin, "-o", str(tmp_path / "x")) == 1
        assert "is not a warmroute admin API" in capsys.readouterr().err

    def test_a_refusal(self, admin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        answers(status=404)
        assert export("--admin", admin, "-o", str(tmp_path / "x")) == 1
        assert "answered HTTP 404" in capsys.readouterr().err

    def test_a_file_that_cannot_be_written(
        self, admin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        answers(line(0.0, 64, 1))
        for name in ("no/such/folder.jsonl", "no/such/folder.jsonl.gz"):
            assert export("--admin", admin, "-o", str(tmp_path / name)) == 2
            assert capsys.readouterr().err == f"{tmp_path / name}: No such file or directory\n"


# --- a gateway, an engine, and what is left of a conversation


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


async def _joined(client: httpx.AsyncClient, running: Running) -> None:
    for _ in range(500):
        state = await running.live.readiness()
        if state["ready"] and all(model["prompts"]["state"] == "EXACT" for model in state["models"].values()):
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the engine has not joined")


async def test_a_conversation_replayed_hits_what_it_hit(tmp_path: Path) -> None:
    """Through the gateway, its admin API, the command and the trace reader, to the same hit on a simulated engine.

    The first prompt is too long to be tokenized before it is placed: without what its second turn tells of it, nothing
    of it would be known in the trace, and the second turn would hit nothing.
    """
    document = " ".join(f"paragraph {number} of a long secret document" for number in range(900))
    messages = [said("user", document)]
    prompts: list[tuple[int, int]] = []
    async with SimEngineServer(SimEngineOptions(speed=200)) as engine:
        file = tmp_path / "warmroute.yaml"
        settings = {
            "listen": {"port": 0}, "admin": {"port": 0}, "models": {"*": {"tokenizer": "demo"}},
            "engines": [{"url": engine.url, "kind": VLLM}], "state_dir": str(tmp_path / "state"),
            "policy": {"name": "policies.kv_aware:KvAware"},
        }  # fmt: skip
        file.write_text(json.dumps(settings))
        async with Running(config.load(file, environ={})) as running, httpx.AsyncClient(trust_env=False) as client:
            await _joined(client, running)
            for question in ("and what does it say?", "and then?"):
                body = {"model": "demo", "messages": messages, "max_tokens": 8, "ignore_eos": True}
                headers = {"x-session-id": "alice"}
                answer = (await client.post(f"{running.url}/v1/chat/completions", json=body, headers=headers)).json()
                usage = answer["usage"]
                prompts.append((usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
                messages += [said("assistant", answer["choices"][0]["message"]["content"]), said("user", question)]
            trace_file = tmp_path / "load.jsonl"
            arguments = ("--admin", str(running.admin_url), "-o", str(trace_file))
            assert await asyncio.to_thread(export, *arguments) == 0
    trace = read_trace(trace_file)
    assert [request.input_tokens for request in trace.requests] == [tokens for tokens, _ in prompts]
    assert [request.turn for request in trace.requests] == [1, 2]
    assert {request.session for request in trace.requests} == {"0"}
    for word in ("alice", "secret", "demo", engine.url.rpartition(":")[2]):
        assert word not in trace_file.read_text()
    cached = prompts[1][1]
    assert cached > 5_000
    setup = Setup(engines=[EngineSpec(PROFILES["llama-3.1-8b-h100"])])
    trace.requests[1].at += 60  # the engine above was 200 times as fast
    (run,) = compare(trace, [Arm("round_robin", "policies.round_robin:RoundRobin", room=None)], setup)
    hit = run.replayed.served[1].hit_tokens
    assert 0 <= cached - hit < 64 + 16
