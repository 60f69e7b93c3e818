"""`warmroute replay`: what it prints and writes, and what it says of bad input."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from router.cli import main
from router.cli.replay import show
from router.lab.arms import parse_arm
from router.lab.bounds import HitBounds
from router.lab.compare import compare
from router.lab.fleet_model import EngineSpec
from router.lab.measures import Measures
from router.lab.profiles import PROFILES
from router.lab.replay import Setup
from router.lab.report import Report
from router.lab.traces import Trace, TraceRequest

# The second finds two blocks of the first, 1,024 of 3,300 tokens in all.
ROWS = [
    {"timestamp": 0, "input_length": 1_100, "output_length": 5, "hash_ids": [1, 2, 3]},
    {"timestamp": 10_007, "input_length": 1_100, "output_length": 5, "hash_ids": [1, 2, 4]},
    {"timestamp": 20_011, "input_length": 1_100, "output_length": 5, "hash_ids": [9, 10, 11]},
]
WEKA = {"session": "trace_0001", "turn": 1, "t": 0, "input_length": 100, "output_length": 5, "runs": [[0, 2]]}


class Replay:
    """Runs the command on a file of rows; keeps what was printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str, rows: list[dict[str, Any]] | None = None) -> int:
        Path("t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (ROWS if rows is None else rows)))
        return self.command("t.jsonl", *arguments)

    def command(self, *arguments: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["replay", *arguments])
        self.out, self.err = self._capsys.readouterr()
        return int(ended.value.code or 0)

    def json(self, *arguments: str) -> Any:
        assert self(*arguments, "--json", "-") == 0
        return json.loads(self.out)


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Replay:
    monkeypatch.chdir(tmp_path)
    return Replay(capsys)


class TestOutput:
    def test_a_table_and_a_line(self, replay: Replay) -> None:
        assert replay("-p", "kv_aware", "-p", "lmetric:room") == 0
        groups, headings, _, *rows, empty, line = replay.out.splitlines()
        assert (groups.split()[:2], headings.split()[:2]) == (["TTFT", "s"], ["policy", "mean"])
        assert [row.split()[0] for row in rows] == ["kv_aware", "lmetric:room"]
        assert "31.0%" in rows[0]
        assert empty == ""
        assert line == (
            "3 requests on 8 × llama-3.1-8b-h100; hit rate with endless caches 31.0%,"
            " with one LRU cache of all engines' size 31.0%"
        )
        assert replay.err == ""  # a progress bar is for terminals

    def test_three_policies_by_default_and_none_twice(self, replay: Replay) -> None:
        assert [one["policy"] for one in replay.json()["policies"]] == ["kv_aware", "lmetric", "least_work"]
        assert [one["policy"] for one in replay.json("-p", "random", "-p", "random")["policies"]] == ["random"]

    def test_json(self, replay: Replay) -> None:
        told = replay.json("-p", "kv_aware", "--speed", "2")
        assert told["bounds"] == {"infinite": pytest.approx(1_024 / 3_300), "pooled_lru": pytest.approx(1_024 / 3_300)}
        assert (told["trace"]["requests"], told["trace"]["input_tokens"], told["trace"]["speed"]) == (3, 3_300, 2.0)
        (kv_aware,) = told["policies"]
        assert set(kv_aware) == set(Measures.__struct_fields__)
        assert (kv_aware["hit_rate"], kv_aware["refused"]) == (pytest.approx(1_024 / 3_300), 0)
        whole = 6.66 + 0.01983 * (1_100 - 192) + 7.95e-7 * 1_100 * 550
        behind_the_hit = 6.66 + 7.95e-7 * 76 * (1_024 + 38)
        assert kv_aware["ttft_mean_s"] == pytest.approx((2 * whole + behind_the_hit) / 3e3)
        assert kv_aware["ttft_long_p90_s"] is None

    def test_files_beside_the_table(self, replay: Replay) -> None:
        assert replay("-p", "kv_aware", "--json", "r.json", "--html", "r.html") == 0
        assert replay.out.startswith(" ")
        assert json.loads(Path("r.json").read_text())["policies"][0]["policy"] == "kv_aware"
        page = Path("r.html").read_text()
        assert page.startswith("<!doctype html>")
        assert "TTFT by prompt length" in page

    def test_the_same_seed_gives_the_same_figures(self, replay: Replay) -> None:
        arguments = ("-p", "random", "--not-streamed", "0.5", "--seed", "7")
        assert replay.json(*arguments) == replay.json(*arguments)

    def test_sessions(self, replay: Replay) -> None:
        assert replay("-p", "kv_aware", "--sessions-per-s", "1", rows=[WEKA]) == 0
        assert replay.out.splitlines()[-1].startswith("1 requests on")

    def test_a_narrow_terminal_gets_a_column_a_policy(self) -> None:
        trace = Trace("t", 512, [TraceRequest("0", 0.0, 600, 5, [1, 2])])
        setup = Setup(engines=[EngineSpec(PROFILES["llama-3.1-8b-h100"])])
        runs = compare(trace, [parse_arm("kv_aware"), parse_arm("lmetric")], setup)
        report = Report(trace, {}, setup, 0, HitBounds(0.0, 0.0), runs)
        printed: dict[int, list[str]] = {}
        for width in (80, 200):
            console = Console(file=io.StringIO(), width=width)
            show(report, console)
            printed[width] = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
        assert printed[80][0].split() == ["policy", "kv_aware", "lmetric"]
        assert printed[80][2].split()[:3] == ["TTFT", "s", "mean"]
        assert printed[200][3].split()[0] == "kv_aware"
        assert not any("…" in line for lines in printed.values() for line in lines)


def test_only_a_page_loads_plotly() -> None:
    script = "import sys, router.cli; sys.exit('plotly' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


class TestSetup:
    def test_delays_losses_and_outages(self, replay: Replay) -> None:
        told = replay.json(
            *("-p", "kv_aware", "--engines", "2", "--signal-delay-ms", "20", "--event-delay-ms", "500"),
            *("--load-delay-ms", "100", "--event-loss", "0.5", "--not-streamed", "0.25"),
            *("--outage", "0:1:2.5", "--outage", "1:30:31", "--seed", "9"),
        )["setup"]
        assert len(told.pop("engines")) == 2
        assert told == {
            "signal_delay_s": 0.02,
            "event_delay_s": 0.5,
            "load_delay_s": 0.1,
            "event_loss": 0.5,
            "not_streamed": 0.25,
            "outages": [{"engine": 0, "at_s": 1.0, "back_s": 2.5}, {"engine": 1, "at_s": 30.0, "back_s": 31.0}],
            "seed": 9,
        }

    def test_an_outage_happens(self, replay: Replay) -> None:
        """The only engine is gone while the second request comes, and what it held is lost."""
        (whole,) = replay.json("-p", "kv_aware", "--engines", "1")["policies"]
        (broken,) = replay.json("-p", "kv_aware", "--engines", "1", "--outage", "0:5:12")["policies"]
        assert (whole["hit_rate"], broken["hit_rate"]) == (pytest.approx(1_024 / 3_300), 0.0)
        assert broken["ttft_mean_s"] > whole["ttft_mean_s"] + 0.5

    def test_limit(self, replay: Replay) -> None:
        assert replay.json("-p", "kv_aware", "--limit", "2")["policies"][0]["requests"] == 2

    @pytest.mark.parametrize(
        ("arguments", "names"),
        [
            ((), ["llama-3.1-8b-h100"] * 8),
            (("--engines", "2"), ["llama-3.1-8b-h100"] * 2),
            (("--engine", "llama-3.1-8b-h200", "--engines", "3"), ["llama-3.1-8b-h200"] * 3),
            (("--engine", "2xllama-3.1-8b-h200"), ["llama-3.1-8b-h200"] * 2),
            (
                ("--engine", "2xllama-3.1-8b-h100", "--engine", "llama-3.1-70b-tp4-h100"),
                ["llama-3.1-8b-h100"] * 2 + ["llama-3.1-70b-tp4-h100"],
            ),
        ],
    )
    def test_fleets(self, replay: Replay, arguments: tuple[str, ...], names: list[str]) -> None:
        engines = replay.json("-p", "kv_aware", *arguments)["setup"]["engines"]
        assert [engine["name"] for engine in engines] == names

    def test_the_chunk_is_every_engines(self, replay: Replay) -> None:
        arguments = ("--chunk", "2048", "--engine", "2xllama-3.1-8b-h100", "--engine", "llama-3.1-8b-h200")
        engines = replay.json("-p", "kv_aware", *arguments)["setup"]["engines"]
        assert [engine["max_batched_tokens"] for engine in engines] == [2_048] * 3

    def test_engines_of_ones_own(self, replay: Replay) -> None:
        Path("engines.yaml").write_text(
            "slow: {rates: {c0_ms: 1000, c2_ms: 1e-6}, capacity_tokens: 5000, max_batched_tokens: 600}\n"
            "slower: {like: slow, rates: {c0_ms: 2000}, max_num_seqs: 4}\n"
        )
        told = replay.json("-p", "kv_aware", "--engine-file", "engines.yaml", "--engine", "slow", "--engine", "slower")
        assert told["setup"]["engines"] == [
            {"name": "slow", "capacity_tokens": 4_608, "max_batched_tokens": 600},
            {"name": "slower", "capacity_tokens": 4_608, "max_batched_tokens": 600},
        ]
        assert told["policies"][0]["ttft_p50_s"] > 1.0

    def test_json_is_an_engine_file_too(self, replay: Replay) -> None:
        Path("engines.json").write_text(json.dumps({"mine": {"like": "llama-3.1-8b-h200"}}))
        told = replay.json("-p", "kv_aware", "--engine-file", "engines.json", "--engine", "2xmine")
        assert [engine["capacity_tokens"] for engine in told["setup"]["engines"]] == [889_856] * 2


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("--speed", "0"), "t.jsonl: speed can't be 0.0"),
            (
                ("-p", "kv_awre"),
                "no 'kv_awre' in warmroute.policies (did you mean 'kv_aware'?); installed: aibrix_prefix,",
            ),
            (("-p", "kv_aware:rom"), "'kv_aware:rom': a policy's name, and perhaps one of :push, "),
            (
                ("--engine", "llama-3.1-8b-h10"),
                "no engine 'llama-3.1-8b-h10' (did you mean 'llama-3.1-8b-h100'?); known: llama-3.1-8b-h100, "
                "llama-3.1-70b-tp4-h100, ",
            ),
            (("--engine", "0xllama-3.1-8b-h100"), "0 engines; it has to be 1 to 1,000"),
            (("--engine", "2xllama-3.1-8b-h100", "--engines", "3"), "--engines 3 is for one engine's name; "),
            (("--engines", "1001"), "1001 engines; it has to be 1 to 1,000"),
            (("--outage", "8:1:2"), "--outage 8:1:2: engines are numbered from 0 to 7"),
            (("--outage", "0:1"), "--outage 0:1: it has to be ENGINE:AT:BACK"),
            (("--outage", "0:2:1"), "--outage 0:2:1: it has to end after it began"),
            (("--outage", "0:2:inf"), "--outage 0:2:inf: it has to end after it began"),
            (("--json", "no/such/file"), "no/such/file: there is no folder no/such"),
            (("--html", "."), ".: is a folder"),
            (("--engine-file", "absent.yaml"), "absent.yaml: cannot be read: No such file or directory"),
        ],
    )
    def test_one_clear_line(self, replay: Replay, arguments: tuple[str, ...], said: str) -> None:
        assert replay(*arguments) == 2
        assert replay.err.startswith(said)
        assert replay.err.count("\n") == 1
        assert replay.out == ""

    @pytest.mark.parametrize("arguments", [("--event-loss", "1.5"), ("--limit", "0"), ("--chunk", "no")])
    def test_a_value_out_of_range(self, replay: Replay, arguments: tuple[str, str]) -> None:
        assert replay(*arguments) == 2
        assert f"Error: Invalid value for '{arguments[0]}'" in replay.err

    @pytest.mark.parametrize(
        ("make", "said"),
        [
            (lambda: None, "trace.jsonl: No such file or directory\n"),
            (lambda: Path("trace.jsonl").mkdir(), "trace.jsonl: Is a directory\n"),
            (lambda: Path("trace.jsonl").write_text("# A README\n"), "trace.jsonl:1: JSON is malformed: "),
            (
                lambda: Path("trace.jsonl").write_text('{"a": 1}\n'),
                "trace.jsonl: no trace format known to have the fields a\n",
            ),
            (
                lambda: Path("trace.jsonl").write_text(json.dumps(WEKA)),
                "trace.jsonl: its sessions have no arrival times; ",
            ),
        ],
    )
    def test_not_a_trace(self, replay: Replay, make: Callable[[], object], said: str) -> None:
        make()
        assert replay.command("trace.jsonl") == 2
        assert replay.err.startswith(said)
        assert replay.err.count("\n") == 1

    def test_every_mistake_of_an_engine_file(self, replay: Replay) -> None:
        Path("e.yaml").write_text(
            "a: {like: nobody}\nb: {rates: {c9_ms: 1}}\nc: {capacity_tokens: 0}\nd: {capacity: 1}\n"
            "e: 3\nf: {rates: {c1_ms: -1}}\ng: {max_batched_tokens: 16, max_num_seqs: 17}\n"
        )
        assert replay("--engine-file", "e.yaml") == 2
        assert [line.split(";")[0] for line in replay.err.splitlines()] == [
            "e.yaml:1: a: like: no engine 'nobody'",
            "e.yaml:2: b: rates: no c9_ms",
            "e.yaml:3: c: Expected `int` >= 1 - at `$.capacity_tokens`",
            "e.yaml:4: d: Object contains unknown field `capacity`",
            "e.yaml:5: e: Expected `object`, got `int`",
            "e.yaml:6: f: Expected `float` >= 0.0 - at `$.rates[...]`",
            "e.yaml:7: g: max_num_seqs: 17 can't all have a token of max_batched_tokens, 16",
        ]

    def test_an_engine_smaller_than_a_block(self, replay: Replay) -> None:
        Path("e.yaml").write_text("tiny: {capacity_tokens: 511}\n")
        assert replay("--engine-file", "e.yaml", "--engine", "tiny") == 2
        assert replay.err == "engine 'tiny' can't hold a block of this trace, 512 tokens\n"
