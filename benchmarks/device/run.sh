#!/usr/bin/env bash
# Numerics, kernels and, where it exists, the engine on one NVIDIA GPU, in under 8 minutes.
# Usage: benchmarks/device/run.sh OUTPUT_FOLDER    (PYTHON=... chooses the interpreter)
# Leaves numerics.json, kernels.json and engine.json there, each with what failed in it.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:?usage: benchmarks/device/run.sh OUTPUT_FOLDER}
python=${PYTHON:-python3}
mkdir -p "$out"
unset JAX_PLATFORMS
export PYTHONPATH=. PYTHONUNBUFFERED=1 XLA_PYTHON_CLIENT_PREALLOCATE=false
status=0
step() { # name, seconds, command...
  local name=$1 limit=$2
  shift 2
  echo "== $name"
  timeout "$limit" "$@" 2>&1 | tee "$out/$name.log"
  local code=${PIPESTATUS[0]}
  echo "== $name: exit $code"
  [ "$code" -eq 0 ] || status=1
}
nvidia-smi --query-gpu=name,driver_version,clocks.sm,memory.total --format=csv | tee "$out/gpu.csv"
step numerics 150 "$python" -m benchmarks.device.numerics --json "$out/numerics.json"
step kernels 210 "$python" benchmarks/kernels.py --quick --seconds 0.2 --json "$out/kernels.json"
if [ -f benchmarks/device/engine.py ]; then
  step engine 100 "$python" -m benchmarks.device.engine --json "$out/engine.json"
fi
exit $status
