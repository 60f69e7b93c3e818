from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.core import Cleared, KVEvent, Rates, Removed, Stored
from router.lab.engine import DoesNotFit, EngineModel, EngineRequest, StepResult, block_hashes, root_hash
from router.lab.profiles import PROFILES, Profile
from tests.router.lab.reference_engine import ReferenceEngine, Sequence, Step

H100 = PROFILES["llama-3.1-8b-h100"]
SMALL = Profile("small", Rates(c0_ms=1.0, c1_ms=0.01, n0_tokens=4), capacity_tokens=64, max_num_seqs=4)


def traced(id: str, prompt: int, output: int, *, hashes: list[int] | None = None) -> EngineRequest:
    return EngineRequest(id, prompt, output_tokens=output, hashes=hashes or [])


def run_all(model: EngineModel, *, leap: bool = False) -> list[StepResult]:
    results, now = [], 0.0
    while (result := model.step(now, leap=leap)) is not None:
        now += result.duration_ms / 1000
        results.append(result)
    return results


def folded(events: list[KVEvent]) -> dict[int, int]:
    """Copies of each hash that a listener believes the engine holds."""
    held: dict[int, int] = {}
    for event in events:
        match event:
            case Stored():
                for name in event.hashes:
                    held[name] = held.get(name, 0) + 1
            case Removed():
                for name in event.hashes:
                    held[name] -= 1
                    if not held[name]:
                        del held[name]
            case Cleared():
                held.clear()
    return held


# Step times: the published check values, within the fit's own error


@pytest.mark.parametrize(("tokens", "published_ms"), [(2_048, 43.5), (8_192, 199.7), (32_768, 1_082)])
def test_prefill_takes_as_long_as_measured(tokens: int, published_ms: float) -> None:
    model = EngineModel(H100, max_batched_tokens=8_192)
    model.submit(traced("a", tokens, 1))
    assert sum(r.duration_ms for r in run_all(model)) == pytest.approx(published_ms, rel=0.05)


def test_prefill_after_a_long_cached_prefix_pays_for_its_attention() -> None:
    model = EngineModel(H100)
    prefix = list(range(65_536 // 16))
    model.submit(traced("a", 65_536, 1, hashes=prefix))
    run_all(model)
    model.submit(traced("b", 65_536 + 2_048, 1, hashes=prefix))
    (result,) = run_all(model)
    assert result.prefill_tokens == 2_048
    assert result.duration_ms == pytest.approx(150, rel=0.05)


@pytest.mark.parametrize(
    ("batch", "context", "published_ms"), [(1, 1_024, 6.2), (32, 1_024, 8.3), (256, 1_024, 19.6), (32, 16_384, 28.5)]
)
def test_decode_step_takes_as_long_as_measured(batch: int, context: int, published_ms: float) -> None:
    model = EngineModel(H100, capacity_tokens=1_000_000, max_batched_tokens=1_000_000)
    for n in range(batch):
        model.submit(traced(str(n), context - 1, 3))
    model.step()
    result = model.step()
    assert result is not None
    assert len(result.decoded) == batch
    assert result.duration_ms == pytest.approx(published_ms, rel=0.09)


# The cache


def test_a_warm_prompt_hits_all_whole_blocks_but_never_the_last_token() -> None:
    for prompt, cached in ((100, 96), (96, 80), (97, 96), (15, 0), (16, 0), (17, 16)):
        model = EngineModel(H100)
        first, second = (EngineRequest.from_tokens(n, range(prompt), [7], block_size=16) for n in "ab")
        model.submit(first)
        run_all(model)
        model.submit(second)
        run_all(model)
        assert (first.cached_tokens, second.cached_tokens) == (0, cached)


def test_salt_and_adapter_separate_the_cache() -> None:
    roots = {root_hash(lora, salt) for lora in (None, "a", "ab") for salt in (None, "a", "b", "ab")}
    assert len(roots) == 12
    assert block_hashes(range(32), 16, root_hash(None, "a")) != block_hashes(range(32), 16, root_hash("a", None))


def test_an_equal_prompt_scheduled_in_the_same_step_hits_blocks_still_being_computed() -> None:
    model = EngineModel(H100)
    for n in "ab":
        model.submit(EngineRequest.from_tokens(n, range(100), [1, 2], block_size=16))
    result = model.step()
    assert result is not None
    assert [request.cached_tokens for request in result.first] == [0, 96]


def test_the_answer_is_cached_as_its_blocks_fill() -> None:
    model = EngineModel(H100)
    model.submit(EngineRequest.from_tokens("a", range(10), range(100, 130), block_size=16))
    run_all(model)
    follow_up = EngineRequest.from_tokens("b", [*range(10), *range(100, 130), 1, 2], [3], block_size=16)
    model.submit(follow_up)
    run_all(model)
    assert follow_up.cached_tokens == 32


def test_the_tail_of_a_finished_sequence_is_evicted_first() -> None:
    model = EngineModel(SMALL, block_size=16)
    model.submit(EngineRequest.from_tokens("old", range(48), [1], block_size=16))
    run_all(model)
    model.submit(EngineRequest.from_tokens("new", range(100, 132), [1], block_size=16))
    (result,) = run_all(model)
    removed = [name for event in result.events if isinstance(event, Removed) for name in event.hashes]
    assert removed == [block_hashes(range(48), 16, root_hash(None, None))[2]]


def test_two_copies_of_a_block_are_announced_and_removed_one_by_one() -> None:
    model = EngineModel(SMALL, block_size=16)
    events: list[KVEvent] = []
    for id, tokens in (("a", range(32)), ("again", range(32)), ("other", range(500, 562))):
        model.submit(EngineRequest.from_tokens(id, tokens, [1], block_size=16))
        events += [event for result in run_all(model) for event in result.events]
        assert folded(events) == model.pool.cached_hashes
    stored = [name for event in events if isinstance(event, Stored) for name in event.hashes]
    assert len(stored) == len(set(stored)) + 1


def test_reset_is_refused_while_a_block_is_in_use_and_announced_with_the_next_step() -> None:
    model = EngineModel(H100)
    model.submit(EngineRequest.from_tokens("a", range(40), [1, 2, 3], block_size=16))
    model.step()
    assert not model.reset_cache()
    run_all(model)
    assert model.reset_cache()
    assert model.step() is None
    again = EngineRequest.from_tokens("b", range(40), [1], block_size=16)
    model.submit(again)
    result = model.step()
    assert result is not None
    assert isinstance(result.events[0], Cleared)
    assert again.cached_tokens == 0


# The scheduler


def test_a_long_prompt_is_computed_in_chunks_beside_the_decodes() -> None:
    model = EngineModel(H100, max_batched_tokens=1_024)
    model.submit(traced("short", 24, 50))
    model.submit(traced("long", 4_000, 1))
    results = run_all(model)
    assert [r.prefill_tokens for r in results[:5]] == [1_024, 1_023, 1_023, 954, 0]
    assert all(len(r.decoded) == 1 for r in results[1:5])


def test_no_more_than_max_num_seqs_run() -> None:
    model = EngineModel(H100, max_num_seqs=2)
    for n in range(5):
        model.submit(traced(str(n), 10, 4))
    most = 0
    while model.step() is not None:
        most = max(most, model.running)
    assert most == 2


def test_the_youngest_is_preempted_and_computes_its_answer_again() -> None:
    model = EngineModel(SMALL, block_size=16)
    for id in ("old", "young"):
        model.submit(EngineRequest.from_tokens(id, [len(id)] * 24, range(30), block_size=16))
    results = run_all(model)
    assert [[r.id for r in result.preempted] for result in results if result.preempted] == [["young"]]
    assert [r.id for result in results for r in result.finished] == ["old", "young"]
    tokens = {"old": 0, "young": 0}
    for result in results:
        for request in (*result.first, *result.decoded):
            tokens[request.id] += 1
    assert tokens == {"old": 30, "young": 30}


def test_what_can_never_fit_is_refused() -> None:
    model = EngineModel(SMALL, block_size=16)
    model.submit(traced("fits", 60, 5))
    with pytest.raises(DoesNotFit):
        model.submit(traced("not", 60, 6))


def test_shortest_first_counts_uncached_tokens() -> None:
    model = EngineModel(H100, max_num_seqs=1, order="shortest_first")
    model.submit(EngineRequest.from_tokens("warm up", range(1_000), [1], block_size=16))
    run_all(model)
    for id, tokens in (("cold", range(5_000, 5_200)), ("warm", range(1_010))):
        model.submit(EngineRequest.from_tokens(id, tokens, [1], block_size=16))
    assert [r.id for result in run_all(model) for r in result.finished] == ["warm", "cold"]


def test_limits_with_which_a_sequence_could_starve_are_refused() -> None:
    with pytest.raises(ValueError, match="max_batched_tokens"):
        EngineModel(H100, max_num_seqs=10, max_batched_tokens=9)


# Against the reference

REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 12),  # arrives before this step
        st.sampled_from("xyz"),  # which text it begins with
        st.integers(1, 30),  # prompt tokens
        st.integers(1, 20),  # output tokens
        st.booleans(),  # whether the blocks of the answer have names
    ),
    min_size=1,
    max_size=12,
)
ABORTS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 11)), max_size=4)
ABORTED_HEAD = [  # the third is preempted, heads the queue, does not fit; once it is gone, the fourth does
    (0, "x", 1, 13, False),
    (0, "y", 27, 7, False),
    (0, "x", 11, 2, False),
    (0, "x", 1, 1, False),
    (0, "x", 1, 1, False),
]


def named_blocks(text: str, tokens: int, size: int) -> list[int]:
    return [ord(text) * 1000 + index for index in range(tokens // size)]


def assert_same(step: Step | None, result: StepResult | None) -> None:
    if step is None or result is None:
        assert step is None
        assert result is None
        return
    assert result.duration_ms == pytest.approx(step.ms)
    assert sorted(r.id for r in (*result.decoded, *result.first)) == sorted(step.produced)
    assert {r.id for r in result.finished} == step.finished
    assert [r.id for r in result.preempted] == step.preempted
    log = [
        ("stored" if isinstance(event, Stored) else "removed", name)
        for event in result.events
        if isinstance(event, Stored | Removed)
        for name in event.hashes
    ]
    assert log == step.log


@given(
    REQUESTS,
    ABORTS,
    st.sampled_from([1, 2, 4]),
    st.integers(13, 30),
    st.integers(1, 4),
    st.integers(4, 16),
    st.booleans(),
)
@example(ABORTED_HEAD, [(12, 2)], 1, 13, 3, 5, False)
@example([*ABORTED_HEAD[:4], (0, "x", 2, 1, False)], [(12, 2)], 1, 13, 4, 5, False)
def test_every_step_is_that_of_the_reference(
    specs: list[tuple[int, str, int, int, bool]],
    aborts: list[tuple[int, int]],
    size: int,
    blocks_of_4: int,
    seats: int,
    budget: int,
    whole: bool,
) -> None:
    blocks = blocks_of_4 * 4 // size
    model = EngineModel(
        SMALL,
        block_size=size,
        capacity_tokens=blocks * size,
        max_num_seqs=seats,
        max_batched_tokens=budget,
        reserve_whole=whole,
    )
    reference = ReferenceEngine(SMALL.rates, size, blocks, seats, budget, whole)
    requests: dict[str, EngineRequest] = {}
    sequences: dict[str, Sequence] = {}
    events: list[KVEvent] = []
    for number in range(2_000):
        for index, (arrival, text, prompt, output, named) in enumerate(specs):
            if arrival == number and prompt + output - 1 <= blocks * size:
                id = str(index)
                hashes = named_blocks(text, prompt + output if named else prompt, size)
                requests[id] = traced(id, prompt, output, hashes=hashes)
                sequences[id] = Sequence(id, prompt, output, hashes)
                model.submit(requests[id])
                reference.waiting.append(sequences[id])
        for step, index in aborts:
            if step == number and str(index) in requests:
                model.abort(requests[str(index)])
                reference.abort(str(index))
        expected, result = reference.step(), model.step()
        assert_same(expected, result)
        if result is not None:
            events += result.events
        assert model.waiting == len(reference.waiting)
        assert model.running == len(reference.running)
        assert model.pool.free_hashes() == [block.name for block in reference.free]
        assert folded(events) == model.pool.cached_hashes
        if result is None and number > 12:
            break
    else:
        raise AssertionError("the engine did not come to rest")
    assert {id: r.cached_tokens for id, r in requests.items()} == {id: s.cached for id, s in sequences.items()}
    assert model.pool.used == 0
    assert len(model._block_calendar) == len(model._end_calendar) == 0


# Leaps


@given(REQUESTS, st.sampled_from([2, 16]), st.lists(st.floats(0.0, 0.2), max_size=8))
def test_leaps_end_where_single_steps_would(
    specs: list[tuple[int, str, int, int, bool]], size: int, interruptions: list[float]
) -> None:
    def finish_times(leap: bool) -> dict[str, float]:
        model = EngineModel(SMALL, block_size=size, capacity_tokens=400, max_num_seqs=4, max_batched_tokens=64)
        arrivals = sorted((n * 0.003, str(i), p, o) for i, (n, _, p, o, _) in enumerate(specs))
        stops = iter(sorted(interruptions))
        stop = next(stops, None)
        times: dict[str, float] = {}
        now = 0.0
        while arrivals or model.running or model.waiting:
            while arrivals and arrivals[0][0] <= now:
                _, id, prompt, output = arrivals.pop(0)
                model.submit(traced(id, prompt, output))
            result = model.step(now, leap=leap)
            if result is None:
                now = arrivals[0][0]
                continue
            end = now + result.duration_ms / 1000
            cut = min([arrivals[0][0]] if arrivals else [end], default=end)
            while stop is not None and stop < now:
                stop = next(stops, None)
            cut = min(cut, end if stop is None else stop)
            if result.steps > 1 and cut < end:
                result = model.interrupt(cut)
            now += result.duration_ms / 1000
            times |= {request.id: now for request in result.finished}
        return times

    assert finish_times(leap=True) == pytest.approx(finish_times(leap=False))


def test_an_interrupted_leap_keeps_the_step_under_way() -> None:
    model = EngineModel(H100, block_size=512)
    model.submit(traced("a", 100, 300))
    first = model.step()
    assert first is not None
    leap = model.step(10.0, leap=True)
    assert leap is not None
    assert leap.steps > 200
    cut = model.interrupt(10.0 + 2.5 * leap.duration_ms / leap.steps / 1000)
    assert cut.steps == 3
    assert model.interrupt(10.0).steps == 0
    assert model.produced(first.first[0]) == 1


# The profiles


def test_profiles_are_named_after_themselves_and_hold_what_was_measured() -> None:
    assert {name: profile.capacity_tokens for name, profile in PROFILES.items()} == {
        "llama-3.1-8b-h100": 440_000,
        "llama-3.1-70b-tp4-h100": 461_376,
        "llama-3.1-70b-tp8-h100": 1_330_000,
        "llama-3.1-8b-h200": 890_000,
    }
