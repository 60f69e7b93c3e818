from __future__ import annotations

from collections import defaultdict

import pytest
from prometheus_client.parser import text_string_to_metric_families

from adapters._metrics import by_rank, first, label, rank_of, samples, whole
from tests.adapters.wire import recorded_bytes

ENGINES = ["vllm-0.32.0", "sglang-0.5.23"]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_gauge_and_counter_equals_a_full_parse(engine: str) -> None:
    page = recorded_bytes(engine, "metrics.txt")
    parsed = defaultdict(list)
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples if family.type in ("gauge", "counter", "unknown") else ():
            parsed[sample.name].append((dict(sample.labels), sample.value))
    assert len(parsed) > 60
    for name, expected in parsed.items():
        found = list(samples(page, name.encode()))
        assert repr([value for _, value in found]) == repr([value for _, value in expected]), name  # NaN equals itself
        for (labels, _), (expected_labels, _) in zip(found, expected, strict=True):
            assert {key: label(labels, key.encode()) for key in expected_labels} == expected_labels, name


PAGE = b"""# HELP vllm:load Of load{engine="9"} 1
# TYPE vllm:load gauge
vllm:load{engine="0",model_name="a,b}c"} 1.0
vllm:load{engine="1",model_name="a,b}c"} 2.5
vllm:load{engine="1",model_name="other"} 4
vllm:load_by_reason{engine="0",reason="x"} 7.0
vllm:loads{engine="0"} 8.0
plain 5e3
not_a_number{engine="0"} NaN
workers{dp_rank="0",tp_rank="0"} 3
workers{dp_rank="0",tp_rank="1"} 3
workers{dp_rank="1",tp_rank="0"} 4
broken{engine="0"}
last 6"""


def test_sums_are_by_rank() -> None:
    assert by_rank(PAGE, b"vllm:load", rank=b"engine") == {0: 1.0, 1: 6.5}


def test_a_longer_name_is_another_one() -> None:
    assert by_rank(PAGE, b"vllm:load_by_reason", rank=b"engine") == {0: 7.0}
    assert by_rank(PAGE, b"vllm:loads", rank=b"engine") == {0: 8.0}
    assert by_rank(PAGE, b"vllm:loa", rank=b"engine") == {}


def test_names_without_labels_at_the_end_and_at_the_start() -> None:
    assert first(PAGE, b"plain") == 5000.0
    assert first(PAGE, b"last") == 6.0
    assert first(b"only 1\n", b"only") == 1.0
    assert first(PAGE, b"absent") is None
    assert first(b"", b"only") is None


def test_tensor_parallel_workers_do_not_add_up() -> None:
    assert by_rank(PAGE, b"workers", rank=b"dp_rank") == {0: 3.0, 1: 4.0}


def test_what_is_no_number_does_not_count() -> None:
    assert by_rank(PAGE, b"not_a_number", rank=b"engine") == {}
    assert by_rank(PAGE, b"broken", rank=b"engine") == {}


def test_labels() -> None:
    labels = b'engine="3",model="engine=7",x_engine="4"'
    assert label(labels, b"engine") == "3"
    assert label(labels, b"x_engine") == "4"
    assert label(labels, b"gine") is None
    assert label(b"", b"engine") is None
    assert rank_of(labels, b"engine") == 3
    assert rank_of(labels, b"model") == 0


def test_labels_that_are_not_what_they_should_be() -> None:
    assert label(b'engine="0', b"engine") is None
    assert label(b'engine="\xff"', b"engine") == "\ufffd"
    assert rank_of(b'engine="%b"' % (b"9" * 5000), b"engine") == 0
    assert whole(b'blocks="12",x="y"', b"blocks") == 12
    assert whole(b'blocks="None"', b"blocks") is None
    assert whole(b'blocks="%b"' % (b"9" * 5000), b"blocks") is None


def test_a_sum_is_a_number() -> None:
    page = b'a{engine="0"} +Inf\na{engine="1"} 2\na{engine="2"} NaN\n'
    assert by_rank(page, b"a", rank=b"engine") == {1: 2.0}
