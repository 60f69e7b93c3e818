#!/usr/bin/env bash
# One real vLLM server on this machine's CPU, in the foreground; ctrl-c ends it. Start one a terminal for several.
#
#   start_vllm.sh VENV MODEL_DIR [N]      server N (default 0) takes HTTP port 8000+N, events 5557+N, replay 5657+N
#
# Extra arguments for `vllm serve` come from VLLM_ARGS. Blocks of 32 tokens are the smallest the CPU kernels take.
set -euo pipefail

[ $# -ge 2 ] || { sed -n '2,6p' "$0"; exit 2; }
venv=$1 model=$2 n=${3:-0}
http=$((${HTTP_PORT:-8000} + n)) events=$((${EVENTS_PORT:-5557} + n)) replay=$((${REPLAY_PORT:-5657} + n))

# tcp://* makes vLLM bind; an address without a wildcard (0.0.0.0 too) would make it connect, and nobody would hear it.
events_config='{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "kv-events"'
events_config+=', "endpoint": "tcp://*:'$events'", "replay_endpoint": "tcp://*:'$replay'"}'

# One core for each server; no compiler, which would hold the first sampled request for seconds; no calls to the outside.
export VLLM_CPU_OMP_THREADS_BIND=$((n % $(nproc))) TORCH_COMPILE_DISABLE=1
export VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
# shellcheck disable=SC2086 - VLLM_ARGS is several words
exec "$venv/bin/vllm" serve "$model" --served-model-name tiny --host 127.0.0.1 --port "$http" \
    --block-size 32 --max-model-len 8192 --kv-cache-memory-bytes 16777216 --enforce-eager \
    --enable-prefix-caching --enable-prompt-tokens-details --kv-events-config "$events_config" ${VLLM_ARGS:-}
