"""Every form of a KV event batch that vLLM 0.9 to 0.33 and SGLang 0.4.6 to 0.5.23 send becomes one normal form."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters._events import decode
from router.core import Cleared, EventBatch, Removed, Stored
from router.errors import EngineProtocolError
from tests.adapters.wire import RECORDINGS, batch, pack, recorded_batches, removed, stored

# Written by each version's own message classes, run without a GPU: hashes [1, 2] (SGLang: [1, -2]), no parent, tokens 5
# to 8, block size 2, then the first removed, then all cleared, by rank 0 at 1.5 s.
GOLDEN = json.loads((RECORDINGS / "golden-payloads.json").read_text())
WITHOUT_RANK = ("0.9.0.1", "0.4.6.post5")


def the_normal_form(*hashes: int, rank: int | None) -> EventBatch:
    return EventBatch(
        seq=7,
        events=[Stored(list(hashes), None, [5, 6, 7, 8], 2), Removed([1]), Cleared()],
        rank=rank,
        at=1.5,
    )


def only(*events: Any) -> Any:
    """The one event a batch of one event decodes to."""
    decoded = decode(0, batch(*events))
    assert decoded.skipped == 0
    assert len(decoded.events) == 1
    return decoded.events[0]


def skipped(*events: Any) -> bool:
    """Whether all of them were left out, and counted."""
    decoded = decode(0, batch(*events))
    return decoded.events == [] and decoded.skipped == len(events)


@pytest.mark.parametrize("version", GOLDEN["vllm"])
def test_golden_payloads_of_vllm(version: str) -> None:
    rank = None if version in WITHOUT_RANK else 0
    assert decode(7, bytes.fromhex(GOLDEN["vllm"][version])) == the_normal_form(1, 2, rank=rank)


@pytest.mark.parametrize("version", GOLDEN["sglang"])
def test_golden_payloads_of_sglang(version: str) -> None:
    rank = None if version in WITHOUT_RANK else 0
    assert decode(7, bytes.fromhex(GOLDEN["sglang"][version])) == the_normal_form(1, 2**64 - 2, rank=rank)


def test_longer_arrays_and_unknown_fields_are_read() -> None:
    longer = ["BlockStored", [1], None, [5, 6], 2, None, "GPU", None, None, 0, "full_attention", None, "LOCAL", "x", {}]
    decoded = decode(0, pack([1.5, [longer, stored(1, a_field_of_tomorrow=[1, {}])], 0, "and more"]))
    assert [event.hashes for event in decoded.events] == [[1], [1]]
    assert decoded.skipped == 0


def test_a_negative_hash_is_the_same_number_in_child_and_parent() -> None:
    parent, child = only(stored(-2)), only(stored(3, parent_block_hash=-2))
    assert child.parent == parent.hashes[0] == 2**64 - 2


@pytest.mark.parametrize("length", [16, 32])
def test_a_digest_counts_by_its_last_eight_bytes(length: int) -> None:
    digest = bytes(length - 8) + (1403909460543360175).to_bytes(8, "big")
    event = only(stored(digest, parent_block_hash=digest))
    assert event.hashes == [1403909460543360175]
    assert event.parent == 1403909460543360175
    assert only(removed(digest)).hashes == [1403909460543360175]


def test_a_parent_of_zero_is_no_parent() -> None:
    assert only(stored(1, parent_block_hash=0)).parent is None


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, "gpu"),
        ("GPU", "gpu"),
        ("gpu", "gpu"),
        ("CPU", "host"),
        ("cpu", "host"),
        ("CPU_PINNED", "host"),
        ("STORAGE", "disk"),
        ("DISK", "disk"),
        ("fs", "disk"),
        ("OBJ", "remote"),
        ("EXTERNAL", "remote"),
    ],
)
def test_media_are_tiers(medium: str | None, tier: str) -> None:
    assert only(stored(1, medium=medium)).tier == tier
    assert only(removed(1, medium=medium)).tier == tier


def test_a_block_of_another_machine_is_remote() -> None:
    assert only(stored(1, medium="CPU", locality="REMOTE")).tier == "remote"
    assert only(stored(1, medium="CPU", locality="LOCAL")).tier == "host"
    assert only(removed(1, medium="STORAGE", locality="REMOTE")).tier == "remote"


def test_an_unknown_medium_earns_no_credit() -> None:
    assert skipped(stored(1, medium="TAPE"), stored(1, medium=7), removed(1, medium="TAPE"))


@pytest.mark.parametrize("kind", [None, "full_attention", "mla_attention", "sink_full_attention"])
def test_groups_that_hold_whole_prefixes_count(kind: str | None) -> None:
    assert only(stored(1, group_idx=3, kv_cache_spec_kind=kind)).group == 3


@pytest.mark.parametrize("kind", ["sliding_window", "mamba", "chunked_local_attention", "cross_attention", "unknown"])
def test_groups_that_hold_parts_of_prefixes_are_skipped(kind: str) -> None:
    assert skipped(stored(1, group_idx=1, kv_cache_spec_kind=kind))


def test_equal_hashes_in_two_groups_stay_apart() -> None:
    decoded = decode(0, batch(stored(1, group_idx=0), stored(1, group_idx=1), removed(1, group_idx=1)))
    assert [event.group for event in decoded.events] == [0, 1, 1]  # type: ignore[union-attr]


def test_tokens_that_do_not_fill_the_blocks_are_skipped() -> None:
    assert skipped(stored(1, 2, token_ids=[1, 2, 3]), stored(1, token_ids=[1, 2, 3, 4]), stored(1, block_size=0))


def test_a_placeholder_of_an_offload_tier_carries_no_tokens() -> None:
    event = only(stored(9, token_ids=[], block_size=0, medium="cpu"))
    assert event == Stored([9], None, [], 0, "host")


def test_bigram_tokens_of_eagle_become_their_first_ids() -> None:
    assert only(stored(1, 2, token_ids=[[10, 11], [11, 12], [12, 13], [13, 14]])).tokens == [10, 11, 12, 13]


def test_a_page_of_one_token() -> None:
    event = only(stored(1, 2, 3, token_ids=[7, 8, 9], block_size=1))
    assert (event.block_size, event.tokens) == (1, [7, 8, 9])


@pytest.mark.parametrize("token", [-1, 2**32, 1.0, "1", None, [], [2**32]])
def test_token_ids_beyond_u32_are_skipped(token: object) -> None:
    assert skipped(stored(1, token_ids=[1, token]), stored(1, token_ids=[token, 1]))


def test_the_largest_token_id_is_kept() -> None:
    assert only(stored(1, token_ids=[0, 2**32 - 1])).tokens == [0, 2**32 - 1]


class TestIdentity:
    def test_salt_of_vllm_is_on_the_first_block(self) -> None:
        event = only(stored(1, 2, extra_keys=[["tenant-a"], None]))
        assert (event.salt, event.lora, event.media) == ("tenant-a", None, None)

    def test_salt_of_sglang_is_a_field(self) -> None:
        assert only(stored(1, cache_salt="tenant-a")).salt == "tenant-a"

    def test_a_lora_name_is_no_salt(self) -> None:
        event = only(stored(1, 2, lora_id=1, lora_name="tiny", extra_keys=[["tiny"], ["tiny"]]))
        assert (event.lora, event.salt) == ("tiny", None)

    def test_lora_comes_before_the_salt(self) -> None:
        event = only(stored(1, 2, lora_id=1, lora_name="tiny", extra_keys=[["tiny", "tiny"], ["tiny"]]))
        assert (event.lora, event.salt) == ("tiny", "tiny")

    def test_a_lora_without_a_name_does_not_pass_for_the_base_model(self) -> None:
        assert skipped(["BlockStored", [1], None, [5, 6], 2, 1, "GPU"])

    def test_media_are_named_by_block(self) -> None:
        event = only(stored(1, 2, extra_keys=[[["img-a", 1], "salt"], [["img-a", -1], ["img-b", 0]]]))
        assert event.media == ((0, "img-a"), (1, "img-a"), (1, "img-b"))
        assert event.salt == "salt"

    def test_a_string_that_can_be_no_salt_is_not_understood(self) -> None:
        assert skipped(
            stored(1, 2, extra_keys=[None, ["img-a"]]),  # vLLM 0.17 and 0.18 named media without an offset
            stored(1, extra_keys=[["img-a", "salt"]]),
            stored(1, parent_block_hash=5, extra_keys=[["salt"]]),
        )

    @pytest.mark.parametrize("key", [b"digest of a prompt embedding", 1, ["a", "b"], ["a", 1, 2], {}])
    def test_a_key_of_an_unknown_kind_earns_no_credit(self, key: object) -> None:
        assert skipped(stored(1, 2, extra_keys=[None, [key]]))

    def test_what_is_no_text_is_no_salt_and_no_lora(self) -> None:
        assert skipped(stored(1, cache_salt=5), stored(1, lora_name=b"x"), stored(1, extra_keys=7))


def test_milliseconds_of_mooncake_become_seconds() -> None:
    assert decode(0, batch(at=1_795_980_222_233)).at == pytest.approx(1_795_980_222.233)
    assert decode(0, batch(at=1_795_980_222)).at == 1_795_980_222
    assert decode(0, batch(at=None)).at is None


def test_maps_of_mooncake_are_read() -> None:
    event = {"event_type": "stored", "block_hashes": [-5], "token_ids": None, "block_size": None, "medium": "DISK"}
    assert only(event) == Stored([2**64 - 5], None, [], 0, "disk")
    assert skipped(event | {"block_hashes": []})


def test_one_bad_event_does_not_cost_the_batch() -> None:
    bad = [
        None,
        5,
        "BlockStored",
        [],
        {},
        ["BlockStored"],
        {"type": "BlockStored"},
        {"type": []},
        {"type": "BlockMoved"},
    ]
    decoded = decode(3, batch(stored(1), *bad, removed(1)))
    assert [type(event) for event in decoded.events] == [Stored, Removed]
    assert decoded.skipped == len(bad)


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x93", pack(None), pack([]), pack([1.5]), pack([1.5, None]), pack({"ts": 1.5}), b"\x81\x90\x00"],
)
def test_what_is_no_batch_is_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(EngineProtocolError):
        decode(0, payload)


def test_nesting_without_end_is_a_protocol_error() -> None:
    with pytest.raises(EngineProtocolError):
        decode(0, b"\x91" * 100_000 + b"\xc0")


def test_errors_hold_nothing_of_the_payload() -> None:
    with pytest.raises(EngineProtocolError) as caught:
        decode(0, pack([1.5, "hunter2"]))
    assert "hunter2" not in str(caught.value) + caught.value.detail
    assert caught.value.__cause__ is None


def is_normal(event: object) -> bool:
    """Whether an event keeps the promises of `router.core`, whatever was on the wire."""
    if isinstance(event, Cleared):
        return True
    assert isinstance(event, Stored | Removed)
    assert event.hashes
    assert all(type(value) is int and 0 <= value < 2**64 for value in event.hashes)
    assert event.tier in ("gpu", "host", "disk", "remote")
    assert type(event.group) is int
    if isinstance(event, Stored):
        assert event.parent is None or 0 < event.parent < 2**64
        assert all(0 <= token < 2**32 for token in event.tokens)
        assert len(event.tokens) in (0, event.block_size * len(event.hashes))
        assert all(value is None or type(value) is str for value in (event.lora, event.salt))
    return True


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
)


@given(field=st.sampled_from(FIELDS), value=ANYTHING, other=ANYTHING)
@settings(max_examples=400, deadline=None)
def test_any_value_in_any_field_is_read_or_skipped(field: str, value: object, other: object) -> None:
    events = [
        stored(1, 2, **{field: value}),
        removed(3, **{field: value}),
        other,
        list(stored(1, **{field: value}).values()),
    ]
    decoded = decode(0, batch(*events))
    assert len(decoded.events) + decoded.skipped == len(events)
    assert all(is_normal(event) for event in decoded.events)


@given(payload=st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_decode_or_raise_our_error(payload: bytes) -> None:
    try:
        decode(0, payload)
    except EngineProtocolError:
        pass


def test_bytes_flipped_in_a_recorded_batch_decode_or_raise_our_error() -> None:
    dice = random.Random(7)
    payloads = [payload for _, payload in recorded_batches("vllm-0.32.0")]
    for _ in range(2000):
        damaged = bytearray(dice.choice(payloads))
        damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        try:
            assert all(is_normal(event) for event in decode(0, bytes(damaged)).events)
        except EngineProtocolError:
            pass


@pytest.mark.parametrize(
    ("engine", "name"),
    [("vllm-0.32.0", "events.jsonl"), ("vllm-0.32.0", "events-lora-bytehash.jsonl"), ("sglang-0.5.23", "events.jsonl")],
)
def test_recorded_batches_decode_whole(engine: str, name: str) -> None:
    for seq, payload in recorded_batches(engine, name):
        decoded = decode(seq, payload)
        at, events, rank = msgspec.msgpack.decode(payload)
        assert (decoded.at, decoded.rank, decoded.skipped) == (at, rank, 0)
        assert len(decoded.events) == len(events)
        assert all(is_normal(event) for event in decoded.events)


def test_recorded_loras_and_salts_are_seen() -> None:
    events = [
        event
        for seq, payload in recorded_batches("vllm-0.32.0", "events-lora-bytehash.jsonl")
        for event in decode(seq, payload).events
        if isinstance(event, Stored) and event.parent is None
    ]
    assert {(event.lora, event.salt) for event in events} == {
        (None, None),
        (None, "tenant-a"),
        (None, "tenant-b"),
        ("tiny-lora", None),
        ("tiny-lora", "tenant-a"),
    }
    salts = [e.salt for s, p in recorded_batches("sglang-0.5.23") for e in decode(s, p).events if isinstance(e, Stored)]
    assert {salt for salt in salts if salt} == {"tenant-a"}
