"""Compiles the engine's largest step programs for a GPU that is not there.

A program of its own (`python -m jaxllm.planning.device_compile`): it reads a job as JSON from
standard input and writes what is there while each program runs, in bytes, as JSON. It runs with
JAX_PLATFORMS=cpu, without which the CUDA plugin looks for a device and fails. Nothing imports it:
the planner itself runs without JAX.

Three layers stand for all: each layer's temporaries are free before the next begins. (Llama-3.1-8B
with three to ten layers takes the same to 20 kilobytes, with two up to 8 % less.)
"""

import dataclasses
import json
import sys
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from jaxllm.execution.mesh import TENSOR_AXIS, HeadLayout
from jaxllm.execution.ops import choose_ops
from jaxllm.execution.parameters import FunctionalModel
from jaxllm.execution.programs import Programs, RunnerConfig
from jaxllm.execution.step import AttentionPlan
from jaxllm.execution.step_memory import ProgramMemory, largest_programs, step_memory
from jaxllm.models.registry import find_family
from jaxllm.planning.gpus import Gpu
from pallas_kernels.paged_attention.registry import select_impl

# Limits by compute capability, from the CUDA programming guide: shared memory of a multiprocessor
# and of a block (bytes), threads and float32 units of a multiprocessor.
_ARCHITECTURES = {
    "8.0": (167936, 166912, 2048, 64),
    "8.6": (102400, 101376, 1536, 128),
    "8.9": (102400, 101376, 1536, 128),
    "9.0": (233472, 232448, 2048, 128),
    "10.0": (233472, 232448, 2048, 128),
}
# Names that JAX knows where they are not the table's; an L40S is an L40 with other clocks.
_DEVICE_KINDS = {
    "A100-40": "A100",
    "A100-80": "A100",
    "L40S": "L40",
    "RTX-4090": "GeForce RTX 4090",
}
# Parts for which the compiler may use instructions of this very architecture.
_ACCELERATED = ("9.0", "10.0")


def target_config(gpu: Gpu) -> str:
    """XLA's description of `gpu`, a GpuTargetConfigProto in text form."""
    shared, shared_block, threads, units = _ARCHITECTURES[gpu.compute_capability]
    major, minor = gpu.compute_capability.split(".")
    kind = "NVIDIA " + _DEVICE_KINDS.get(gpu.name, gpu.name)
    extension = "feature_extension: ACCELERATED_FEATURES"
    return f"""
gpu_device_info {{
  device_vendor: "NVIDIA Corporation"
  name: "{kind}"
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: {threads}
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {shared_block}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  core_count: {gpu.multiprocessors}
  fpus_per_core: {units}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  memory_bandwidth: {int(gpu.bandwidth_gbs * 1e9)}
  l2_cache_size: {gpu.l2_mib * 2**20}
  clock_rate_ghz: 1.98
  device_memory_size: {gpu.memory_bytes}
  cuda_compute_capability {{
    major: {major} minor: {minor} {extension if gpu.compute_capability in _ACCELERATED else ""}
  }}
  device_address_bits: 64
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{kind}"
"""


def compile_step(hf_config: dict[str, Any], shape: dict[str, Any], gpu: Gpu) -> dict[str, Any]:
    """{"attention": name, "programs": {name: bytes on one device while it runs, beside parameters
    and pools}, "code": bytes}."""
    return _programs(_shortened(hf_config), shape, gpu)


def _shortened(hf_config: dict[str, Any], layers: int = 3) -> dict[str, Any]:
    short = hf_config | {"num_hidden_layers": min(layers, hf_config["num_hidden_layers"])}
    if hf_config.get("layer_types"):
        short["layer_types"] = hf_config["layer_types"][:layers]
    return short


def _programs(hf_config: dict[str, Any], shape: dict[str, Any], gpu: Gpu) -> dict[str, Any]:
    tp = shape["tp"]
    topology = topologies.get_topology_desc(
        gpu.name.lower(),
        platform="cuda",
        topology=f"1x1x{tp}",
        target_config=target_config(gpu),
    )
    mesh = topologies.make_mesh(topology, (tp,), (TENSOR_AXIS,))
    family = find_family(hf_config)
    config = family.read_config(hf_config)
    dtype = jax.numpy.dtype(shape["dtype"])
    model = FunctionalModel.build(family, config, dtype, mesh, choose_ops("cuda", tp))
    attention = select_impl("auto", platform="cuda", compute_capability=gpu.compute_capability)
    plan = AttentionPlan(
        attention, HeadLayout.of(config, tp), np.dtype(jax.numpy.dtype(shape["kv_dtype"])), mesh
    )
    # None of it depends on the size of the pool; two blocks are the least.
    limits = {f.name: shape[f.name] for f in dataclasses.fields(RunnerConfig) if f.name in shape}
    runner_config = RunnerConfig(**limits, num_blocks=2, enforce_eager=True)
    programs = Programs(model, plan, runner_config)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        measured = {
            key: ProgramMemory.of(programs.compile(key)) for key in largest_programs(runner_config)
        }
    step = step_memory(measured)
    return {"attention": attention, "programs": dict(step.phases), "code": step.code}


def main() -> int:
    job = json.load(sys.stdin)
    answer = compile_step(job["hf_config"], job["shape"], Gpu(**job["gpu"]))
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
