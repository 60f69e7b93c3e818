"""An engine's metrics page: the figures a plain reading finds, or an error that says the page is of no use."""

from __future__ import annotations

from adapters import sglang, vllm
from adapters._metrics import label, samples
from router.errors import EngineProtocolError

WORDS = (
    b"\n", b" ", b"{", b"}", b'"', b"=", b",", b"\\", b"# TYPE x gauge\n", b"\xff", b"1", b"0", b"-1", b"NaN",
    b"+Inf", b"1e400", b"vllm:num_requests_running", b"vllm:num_requests_waiting", b"vllm:kv_cache_usage_perc",
    b"process_start_time_seconds", b'{engine="0"}', b'engine="1"', b'{engine="' + b"9" * 5000 + b'"}',
    b"vllm:cache_config_info", b'block_size="16"', b'num_gpu_blocks="x"', b"vllm:engine_sleep_state",
    b'sleep_state="awake"', b"sglang:num_running_reqs", b'dp_rank="0"', b'{dp_rank="2",tp_rank="0"} 3\n',
    b"sglang:token_usage", b"vllm:num_requests_running 1\n", b'engine="\xc2\xb2"',
)  # fmt: skip

_NAMES = (b"vllm:num_requests_running", b"process_start_time_seconds", b"sglang:token_usage")


def target(data: bytes) -> None:
    for load in (vllm._load, sglang._load_of_page):
        try:
            loads = load(data, 1.0)
        except EngineProtocolError:
            continue
        assert loads
        assert all(type(rank) is int for rank in loads)
    config = vllm._cache_config(data)
    assert config.block_size is None or config.block_size >= 0
    vllm._boot_id(data)
    for name in _NAMES:
        found = list(samples(data, name))
        assert len(found) <= data.count(name)
        for labels, _ in found:
            label(labels, b"engine")
