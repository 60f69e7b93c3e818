"""The grid of policies is run by hand; here its cells, what it keeps between runs, and how it judges."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from router import plugins
from router.lab import synthetic
from router.lab.arms import parse_arm
from router.lab.fleet_model import EngineSpec
from router.lab.measures import Measures
from router.lab.profiles import PROFILES
from router.lab.replay import Setup
from router.lab.traces import Trace, TraceRequest
from tests.policy_grid import __main__ as command
from tests.policy_grid import state, workloads
from tests.policy_grid.cells import ARMS, ELSEWHERE, NOT_BASELINES, OURS, STRONG, Cell, grid
from tests.policy_grid.page import page, tenant_p90_s
from tests.policy_grid.plot import COLOURS, plot
from tests.policy_grid.run import Batch, Job, pending, run_all, run_one
from tests.policy_grid.state import Key, Run
from tests.policy_grid.verdict import LONG, MAIN, half_interval, judge, worst_first
from tests.policy_grid.words import difference, line

TTFT, GOODPUT, SCALED = MAIN
P90, MAX = LONG
FLEET = Setup([EngineSpec(PROFILES["llama-3.1-8b-h100"], max_batched_tokens=8_192)] * 2)
FOREVER = 1e12
MEASURES = Measures(
    policy="any",
    requests=100,
    refused=0,
    retried=0,
    ttft_mean_s=1.0,
    ttft_p50_s=1.0,
    ttft_p90_s=1.0,
    ttft_p99_s=1.0,
    ttft_long_p90_s=10.0,
    ttft_long_max_s=20.0,
    tpot_mean_ms=20.0,
    goodput=0.9,
    goodput_scaled=0.8,
    goodput_tokens=0.9,
    hit_rate=0.1,
    best_hit_rate=0.1,
    late=0.0,
    drain_s=1.0,
    duplicate_share=0.0,
    imbalance=1.0,
    preemptions=0,
    longest_wait_s=0.0,
)


def small_cell(
    arms: Sequence[str] = (OURS, "kv_aware:push", "lmetric"), *, seeds: int = 3, against: Sequence[str] = ()
) -> Cell:
    def make(_: Path, seed: int) -> Trace:
        return synthetic.two_tenants(2.0, 8.0, ratio=3.0, seed=seed)

    return Cell("small", "made", "8/s", make, FLEET, arms, seeds, 0.1, against=against)


def results(cell: Cell, **by_arm: Sequence[dict[str, float | None]]) -> dict[Key, Run]:
    """Of each arm, `:` written as `__`, what its seeds differ in from MEASURES."""
    runs = [
        Run(cell.name, arm.replace("__", ":"), seed, "t", 0.1, msgspec.structs.replace(MEASURES, **changes))
        for arm, seeds in by_arm.items()
        for seed, changes in enumerate(seeds)
    ]
    return {run.key: run for run in runs}


def same(count: int, **changes: float | None) -> list[dict[str, float | None]]:
    return [changes] * count


# -- cells


def test_names_of_cells_are_all_different() -> None:
    assert max(Counter(cell.name for cell in grid()).values()) == 1


@pytest.mark.parametrize("family", ["conversation", "synthetic", "toolagent_like", "weka"])
def test_a_family_has_every_fleet_load_and_chunk(family: str) -> None:
    names = {cell.name for cell in grid() if cell.family == family}

    loads = ("below", "knee", "past")
    wanted = {f"{family}/{n}/{load}/{chunk}" for n in (4, 8, 16) for load in loads for chunk in (2048, 8192)}
    assert names == wanted


@pytest.mark.parametrize("cell", grid(), ids=lambda cell: cell.name)
def test_a_cell_is_what_its_name_says(cell: Cell) -> None:
    if cell.family != "special":
        _, engines, load, chunk = cell.name.split("/")
        assert len(cell.setup.engines) == int(engines)
        assert {spec.max_batched_tokens for spec in cell.setup.engines} == {int(chunk)}
        assert cell.seeds == (1 if load == "past" and cell.family == "weka" else 3)
        assert load == "past" or cell.family == "weka" or tuple(cell.arms) == ARMS
    assert set(STRONG) <= set(cell.arms) <= set(ARMS)
    assert set(cell.against) <= set(cell.arms)


def test_every_arm_is_there_to_be_run() -> None:
    assert len(set(ARMS)) == len(ARMS) == 19
    assert {parse_arm(arm).policy for arm in ARMS} <= set(plugins.names(plugins.POLICIES))


def test_the_whole_grid_takes_an_hour_at_most_on_two_cores() -> None:
    assert sum(batch.takes_s for batch in pending(grid(), {})) / 2 <= 3_600


def test_without_reuse_the_baselines_that_balance_load_are_named() -> None:
    named = {cell.name: cell.against for cell in grid() if cell.against}

    assert set(named.values()) == {("least_work", "lmetric")}
    assert all("zero_reuse" in name for name in named)


@pytest.mark.parametrize(
    "cell", [cell for cell in grid() if cell.family == "special" and cell.file is None], ids=lambda cell: cell.name
)
def test_made_traces_need_no_files_and_differ_by_seed(cell: Cell, tmp_path: Path) -> None:
    first, second = cell.make(tmp_path, 0), cell.make(tmp_path, 1)

    assert 1_800 < len(first.requests) < 15_000
    assert [request.at for request in first.requests] != [request.at for request in second.requests]
    assert cell.alone is None or workloads.only_tenant(first, cell.alone).requests


# -- their traces


@pytest.fixture
def conversation(tmp_path: Path) -> Path:
    """40 requests, one a second, with tails that no other has."""
    rows = [
        {"timestamp": 1_000 * n, "input_length": 600, "output_length": 5, "hash_ids": [0, n + 1]} for n in range(40)
    ]
    (tmp_path / "mooncake_conversation.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_seeds_have_segments_of_their_own(conversation: Path) -> None:
    make = workloads.segment(workloads.Segment("mooncake_conversation", 10, first=4, apart=12), 2.0)

    tails = [[request.blocks[1] - 1 for request in make(conversation, seed).requests] for seed in range(3)]
    assert tails == [list(range(4, 14)), list(range(16, 26)), list(range(28, 38))]
    assert make(conversation, 1).requests[-1].at == pytest.approx(9 / 2.0)


def test_an_overload_is_followed_by_a_quieter_time(conversation: Path) -> None:
    part = workloads.Segment("mooncake_conversation", None)
    trace = workloads.overload_then_recovery(part, high=8.0, high_s=3.0, low=2.0)(conversation, 0)

    assert trace.requests[16].at == pytest.approx(2.0)
    assert trace.requests[24].at == pytest.approx(3.0)
    assert trace.requests[34].at == pytest.approx(3.0 + 10 / 2.0)


def test_sessions_are_cut_where_the_last_one_begins(tmp_path: Path) -> None:
    def turn(session: str, number: int) -> dict[str, object]:
        return {"session": session, "turn": number, "input_length": 64 * 20, "runs": [[number, 20]], "think": 50}

    rows = [turn(session, number) for session in ("a", "b", "c", "d") for number in range(40)]
    (tmp_path / "weka_agentic.jsonl").write_text("\n".join(map(json.dumps, rows)))

    trace = workloads.sessions(2, 0.01)(tmp_path, 1)

    assert {request.session for request in trace.requests} == {"c", "d"}
    begun = [request.at for request in trace.requests if request.after is None]
    assert len(begun) == 2
    assert max(request.at for request in trace.requests) == max(begun)
    assert trace.block_size == 512
    assert {len(request.blocks) for request in trace.requests} == {2}


def test_a_merged_block_is_named_by_its_last_part() -> None:
    requests = [TraceRequest("1", 0.0, 100, 1, list(range(7))), TraceRequest("2", 1.0, 15, 1, [0])]

    merged = workloads.merged_blocks(Trace("t", 16, requests), 3)

    assert merged.block_size == 48
    assert [list(request.blocks) for request in merged.requests] == [[2, 5], []]
    assert list(requests[0].blocks) == list(range(7))


def test_the_plain_file_comes_before_the_gzipped_one(tmp_path: Path) -> None:
    assert workloads.trace_file(tmp_path, "t") is None
    (tmp_path / "t.jsonl.gz").touch()
    assert workloads.trace_file(tmp_path, "t") == tmp_path / "t.jsonl.gz"
    (tmp_path / "t.jsonl").touch()
    assert workloads.trace_file(tmp_path, "t") == tmp_path / "t.jsonl"


# -- runs and what is kept of them


def test_finished_runs_are_kept_and_not_run_again(tmp_path: Path) -> None:
    cell, file = small_cell(seeds=2), tmp_path / "state.jsonl"
    job = Job(tmp_path, "one", file)
    ends: list[object] = []

    assert run_all(pending([cell], {}), job, jobs=2, until=FOREVER, ended=ends.append) is None

    kept = state.read(file, "one")
    assert len(ends) == 2
    assert set(kept.runs) == {Key("small", arm, seed) for arm in cell.arms for seed in (0, 1)}
    assert kept.runs == {run.key: run for end in ends for run in end.runs}  # type: ignore[attr-defined]
    assert pending([cell], kept.runs) == []
    del kept.runs[Key("small", "lmetric", 1)]
    assert [(batch.seed, batch.arms) for batch in pending([cell], kept.runs)] == [(1, ["lmetric"])]


def test_runs_of_other_code_do_not_count(tmp_path: Path) -> None:
    file = tmp_path / "state.jsonl"
    cell = small_cell(("lmetric",))
    for run in results(cell, lmetric=same(3)).values():
        state.append(file, run)

    assert len(state.read(file, "t").runs) == 3
    other = state.read(file, "u")
    assert (other.runs, other.other_tags) == ({}, 3)


def test_a_line_that_was_cut_off_costs_one_run(tmp_path: Path) -> None:
    file = tmp_path / "state.jsonl"
    first, second, third = results(small_cell(("lmetric",)), lmetric=same(3)).values()
    state.append(file, first)
    file.write_bytes(file.read_bytes() + msgspec.json.encode(second)[:50])

    state.end_last_line(file)
    state.append(file, third)
    state.end_last_line(file)

    kept = state.read(file, "t")
    assert list(kept.runs.values()) == [first, third]
    assert kept.unreadable == 1
    assert file.read_bytes().count(b"\n") == 3


def test_no_run_begins_when_time_is_up(tmp_path: Path) -> None:
    ends: list[object] = []

    stopped = run_all(pending([small_cell()], {}), Job(tmp_path, "t", None), jobs=1, until=0.0, ended=ends.append)

    assert stopped == "time is up"
    assert not any(end.runs for end in ends)  # type: ignore[attr-defined]


def test_a_run_that_fails_leaves_the_others_alone(tmp_path: Path) -> None:
    cell = small_cell(("lmetric", "nobody", "round_robin"), seeds=1)
    ends: list[object] = []

    assert run_all(pending([cell], {}), Job(tmp_path, "t", None), jobs=1, until=FOREVER, ended=ends.append) is None

    (end,) = ends
    assert [run.arm for run in end.runs] == ["lmetric", "round_robin"]  # type: ignore[attr-defined]
    (failed,) = end.failed  # type: ignore[attr-defined]
    assert failed.startswith("small, nobody, seed 0: ConfigError: no 'nobody'")


def test_a_tenant_is_measured_with_and_without_the_others(tmp_path: Path) -> None:
    cell = msgspec.structs.replace(small_cell(seeds=1), alone="small")
    run = run_one(cell, cell.make(tmp_path, 0), "lmetric", 0, "t")

    assert set(run.tenant_p90_s) == {"large", "small", "small alone"}
    assert run.measures.requests == len(cell.make(tmp_path, 0).requests)
    by_tenant = tenant_p90_s(cell, "lmetric", {run.key: run})
    assert by_tenant["small alone"] < by_tenant["small"]


def test_the_tag_follows_the_code_that_is_loaded() -> None:
    tag = state.code_tag(["policies"])

    assert tag == state.code_tag(["policies"])
    assert tag != state.code_tag(["policies", "tests.policy_grid.cells"])


# -- verdicts


@pytest.mark.parametrize(("beside_s", "status"), [(1.14, "kept"), (1.16, "broken")])
def test_ten_times_anothers_load_may_raise_a_tenants_p90_by_15_percent(beside_s: float, status: str) -> None:
    cell = msgspec.structs.replace(small_cell(), alone="small")
    runs = results(cell, kv_aware=same(3), kv_aware__push=same(3), lmetric=same(3))
    runs = {
        key: msgspec.structs.replace(run, tenant_p90_s={"large": 9.0, "small": beside_s, "small alone": 1.0})
        for key, run in runs.items()
    }
    verdict = judge(cell, runs)
    assert verdict.status == status
    beside = verdict.comparisons[-1]
    assert (beside.against, beside.ours, beside.theirs) == ("small alone", beside_s, 1.0)


def test_only_some_of_the_arms_may_be_asked_for_as_baselines() -> None:
    cell = small_cell((OURS, "kv_aware:push", "lmetric", "lmetric:room"))
    runs = results(
        cell, kv_aware=same(3), kv_aware__push=same(3), lmetric=same(3), lmetric__room=same(3, ttft_mean_s=0.001)
    )
    assert judge(cell, runs).status == "broken"
    assert judge(cell, runs, baselines=("lmetric",)).status == "kept"


def test_what_other_gateways_do_is_done_at_arrival_and_first_come_first_served() -> None:
    arms = [parse_arm(name) for name in ELSEWHERE]
    assert all(arm.room is None and arm.order == "first_come" for arm in arms)
    assert {arm.policy for arm in arms} == {parse_arm(name).policy for name in ARMS} - {OURS}


def test_no_worse_than_the_best_is_kept() -> None:
    cell = small_cell()
    verdict = judge(cell, results(cell, kv_aware=same(3), kv_aware__push=same(3), lmetric=same(3)))

    assert verdict.status == "kept"
    assert [comparison.promise for comparison in verdict.comparisons] == [*MAIN, *LONG]
    assert all(comparison.worse == 0 for comparison in verdict.comparisons)
    assert worst_first([verdict]) == []


def test_the_best_baseline_is_found_for_each_measure() -> None:
    cell = small_cell((*NOT_BASELINES, "lmetric", "llmd"))
    runs = results(
        cell,
        kv_aware=same(3, ttft_mean_s=1.05, goodput=0.8),
        kv_aware__push=same(3, ttft_mean_s=0.1, goodput=1.0),  # no baseline
        lmetric=same(3, ttft_mean_s=1.0, goodput=0.7),
        llmd=same(3, ttft_mean_s=2.0, goodput=1.0),
    )
    verdict = judge(cell, runs)

    by_promise = {comparison.promise: comparison for comparison in verdict.comparisons}
    assert (by_promise[TTFT].against, by_promise[TTFT].worse) == ("lmetric", pytest.approx(0.05))
    assert (by_promise[GOODPUT].against, by_promise[GOODPUT].worse) == ("llmd", pytest.approx(0.2))
    assert [fault.promise for fault in verdict.faults] == [GOODPUT, TTFT]
    assert verdict.status == "broken"
    assert verdict.over == pytest.approx(0.2 - 0.02)


def test_the_interval_is_of_the_differences_seed_by_seed() -> None:
    cell = small_cell(("kv_aware", "lmetric"))
    runs = results(
        cell,
        kv_aware=[{"ttft_mean_s": 1.1}, {"ttft_mean_s": 2.2}, {"ttft_mean_s": 3.3}],
        lmetric=[{"ttft_mean_s": 1.0}, {"ttft_mean_s": 2.0}, {"ttft_mean_s": 3.0}],
    )
    ttft = judge(cell, runs).comparisons[0]

    # Differences .1, .2, .3 of a mean of 2: .05, .10, .15; mean .10, standard deviation .05, t(2) = 4.303.
    assert ttft.worse == pytest.approx(0.10)
    assert ttft.half == pytest.approx(4.303 * 0.05 / sqrt(3))
    assert ttft.status == "open"  # .10 - .124 < .02 < .10
    assert difference(ttft) == "+10.0 ± 12.4 %"


def test_worse_beyond_the_interval_is_broken() -> None:
    cell = small_cell(("kv_aware", "lmetric"))
    runs = results(
        cell, kv_aware=[{"goodput": 0.70}, {"goodput": 0.72}, {"goodput": 0.74}], lmetric=same(3, goodput=0.8)
    )
    verdict = judge(cell, runs)

    # Of .8: .125, .1, .075; mean .1, standard deviation .025: ± .0621.
    (fault,) = verdict.faults
    assert (fault.promise, verdict.status) == (GOODPUT, "broken")
    assert fault.over == pytest.approx(0.1 - 4.303 * 0.025 / sqrt(3) - 0.02)
    assert "goodput 72.0%, lmetric 80.0%: +10.0 ± 6.2 % worse" in line(verdict)


@pytest.mark.parametrize(("ttft_s", "status"), [(1.019, "kept"), (1.021, "broken")])
def test_a_single_seed_has_2_percent_flat(ttft_s: float, status: str) -> None:
    cell = small_cell(("kv_aware", "lmetric"), seeds=1)

    verdict = judge(cell, results(cell, kv_aware=same(1, ttft_mean_s=ttft_s), lmetric=same(1)))

    assert verdict.status == status
    assert verdict.comparisons[0].half == 0


@pytest.mark.parametrize(("longest_s", "status"), [((23.0, 24.0, 25.0), "kept"), ((10.0, 27.0, 36.0), "broken")])
def test_long_prompts_may_wait_a_fifth_longer_than_with_lmetric(longest_s: Sequence[float], status: str) -> None:
    """Whatever the interval: means of 24.0 and 24.3 against 20."""
    cell = small_cell(("kv_aware", "lmetric", "llmd"))
    runs = results(
        cell,
        kv_aware=[{"ttft_long_max_s": longest} for longest in longest_s],
        lmetric=same(3),
        llmd=same(3, ttft_long_max_s=5.0),  # it is not asked
    )
    verdict = judge(cell, runs)

    assert verdict.status == status
    assert [fault.promise for fault in verdict.faults] == ([MAX] if status == "broken" else [])


def test_a_baseline_whose_long_prompts_wait_is_marked() -> None:
    cell = small_cell(("kv_aware", "lmetric", "dynamo:wspt"))
    runs = results(
        cell,
        kv_aware=same(3, ttft_mean_s=2.0, goodput=0.8),
        lmetric=same(3, ttft_mean_s=3.0),
        dynamo__wspt=same(3, goodput=0.1, ttft_long_p90_s=12.1),
    )
    verdict = judge(cell, runs)

    assert [(fault.against, fault.starves) for fault in verdict.faults] == [("dynamo:wspt", True), ("lmetric", False)]
    assert "dynamo:wspt 1.00 s (its own long prompts wait)" in line(verdict)


def test_without_long_prompts_nothing_is_promised_of_them() -> None:
    cell = small_cell(("kv_aware", "lmetric"))
    none = same(3, ttft_long_p90_s=None, ttft_long_max_s=None)

    verdict = judge(cell, results(cell, kv_aware=none, lmetric=none))

    assert verdict.status == "kept"
    assert {comparison.promise for comparison in verdict.comparisons} == set(MAIN)


def test_named_baselines_are_asked_besides_the_best() -> None:
    cell = small_cell(("kv_aware", "lmetric", "least_work"), against=("least_work", "lmetric"))
    runs = results(
        cell,
        kv_aware=same(3, ttft_mean_s=1.5),
        least_work=same(3, ttft_mean_s=1.2),
        lmetric=[{"ttft_mean_s": 0.5}, {"ttft_mean_s": 1.0}, {"ttft_mean_s": 1.5}],
    )
    asked = [c for c in judge(cell, runs).comparisons if c.promise == TTFT]

    # The best of all is LMetric, whose seeds differ too much to say anything.
    assert [(c.against, c.status) for c in asked] == [("lmetric", "open"), ("least_work", "broken")]


def test_nothing_is_worse_than_a_goodput_of_0() -> None:
    cell = small_cell(("kv_aware", "lmetric"))
    none = same(3, goodput=0.0)

    assert judge(cell, results(cell, kv_aware=none, lmetric=none)).status == "kept"


def test_serving_nobody_is_broken() -> None:
    cell = small_cell(("kv_aware", "lmetric"))
    runs = results(cell, kv_aware=same(3, ttft_mean_s=None), lmetric=same(3))

    (fault,) = judge(cell, runs).faults
    assert (fault.promise, fault.status, fault.ours) == (TTFT, "broken", None)


def test_a_missing_seed_leaves_a_cell_unfinished() -> None:
    cell = small_cell(("kv_aware", "lmetric"))

    assert judge(cell, results(cell, kv_aware=same(3), lmetric=same(2))).status == "unfinished"


def test_broken_cells_come_before_open_ones_and_the_worst_first() -> None:
    cell = small_cell(("kv_aware", "lmetric"))
    verdicts = [
        judge(cell, results(cell, kv_aware=ours, lmetric=same(3)))
        for ours in (
            same(3, goodput=0.85),
            [{"goodput": 0.1}, {"goodput": 0.5}, {"goodput": 0.9}],
            same(3, goodput=0.7),
            same(3),
        )
    ]
    assert [verdict.status for verdict in verdicts] == ["broken", "open", "broken", "kept"]
    assert worst_first(verdicts) == [verdicts[2], verdicts[0], verdicts[1]]


def test_one_value_has_no_interval() -> None:
    assert half_interval([3.0]) == 0
    assert half_interval([1.0, 3.0]) == pytest.approx(12.706 * sqrt(2) / sqrt(2))
    assert half_interval([1.0, 3.0] * 8) == pytest.approx(2.262 * sqrt(16 / 15) / sqrt(16))


# -- the command


def test_the_page_has_every_cell_and_marks_the_best(tmp_path: Path) -> None:
    cell = small_cell(("kv_aware", "lmetric", "llmd"))
    runs = results(
        cell, kv_aware=same(3, goodput=0.5), lmetric=same(3, ttft_mean_s=0.75), llmd=same(3, ttft_mean_s=2.0)
    )
    text = page([judge(cell, runs)], runs, "tag")

    assert "1 broken, 0 open, 0 kept, 0 unfinished" in text
    assert "| small | 1.00 | **0.75** | 2.00 |" in text
    assert "| small | 50.0% | **90.0%** | **90.0%** |" in text
    assert "- **broken** small: goodput 50.0%, lmetric 90.0%: +44.4 % worse; mean TTFT 1.00 s, lmetric 0.75 s" in text


def test_the_command_runs_what_is_named_and_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [small_cell(), msgspec.structs.replace(small_cell(), name="lacking", file="not_there")]
    monkeypatch.setattr(command, "grid", lambda: cells)
    files = {name: tmp_path / name for name in ("state", "json", "page")}
    arguments = ["--traces", str(tmp_path), "--jobs", "1"]
    arguments += [part for name, file in files.items() for part in (f"--{name}", str(file))]

    first = command.main(arguments)
    printed = capsys.readouterr().out
    again = command.main(arguments)

    assert first == again
    assert "1 cells, 9 runs to do" in printed
    assert "no not_there.jsonl or not_there.jsonl.gz" in printed
    assert "1 cells, 0 runs to do" in capsys.readouterr().out
    (facts,) = json.loads(files["json"].read_text())["cells"]
    assert [(run["arm"], run["seed"]) for run in facts["runs"]] == [
        (arm, seed) for arm in cells[0].arms for seed in range(3)
    ]
    assert set(facts["runs"][0]["measures"]) == set(Measures.__struct_fields__)
    assert files["page"].read_text().startswith("# Policies side by side")


@pytest.mark.parametrize(
    ("arguments", "mistake"),
    [
        (["--traces", "nowhere"], "nowhere is not a folder"),
        (["--traces", ".", "--only", "no such cell"], "no cell to run"),
        (["--traces", ".", "--jobs", "0"], "--jobs"),
        (["--traces", ".", "--hours", "inf"], "--hours"),
        (["--traces", ".", "--only", "many_groups", "--state", "."], "Is a directory"),
    ],
)
def test_mistakes_of_the_command_line_are_named(
    arguments: list[str],
    mistake: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)

    assert ended.value.code == 2
    assert mistake in capsys.readouterr().err


def test_batches_of_a_cell_have_the_seeds_apart() -> None:
    cell = small_cell(("lmetric", "llmd"), seeds=2)

    assert pending([cell], {}) == [Batch(cell, 0, ["lmetric", "llmd"]), Batch(cell, 1, ["lmetric", "llmd"])]
    assert [batch.takes_s for batch in pending([cell], {})] == [pytest.approx(0.2)] * 2


# -- picture


def test_what_is_better_than_ours_is_left_of_the_line_and_what_is_worse_right_of_it() -> None:
    cell = small_cell((OURS, "kv_aware:push", "lmetric", "lmetric:room", "dynamo:wspt"))
    runs = results(
        cell,
        kv_aware=same(3, ttft_mean_s=1.0),
        kv_aware__push=same(3, ttft_mean_s=1.0),
        lmetric=same(3, ttft_mean_s=10.0),
        lmetric__room=same(3, ttft_mean_s=1.0),
        dynamo__wspt=same(3, ttft_mean_s=0.5),
    )
    picture = ElementTree.fromstring(plot([judge(cell, runs)], runs))
    line = next(float(tick.get("x1", "")) for tick in picture.iterfind("{*}line") if tick.get("stroke") == "#000000")
    first = {
        path.get("stroke"): float(path.get("d", "")[1:].split()[0])
        for path in picture.iterfind("{*}path")
        if path.get("d")
    }
    at = {arm: first[colour] - line for arm, colour in COLOURS.items()}
    assert at["lmetric:room"] == pytest.approx(0.0, abs=0.1)
    assert at["lmetric"] > 50
    assert at["dynamo:wspt"] < -20


def test_a_cell_that_is_not_finished_is_not_in_the_picture() -> None:
    cell = small_cell()
    runs = results(cell, kv_aware=same(3), lmetric=same(3))
    assert "small" not in plot([judge(cell, runs)], runs)
