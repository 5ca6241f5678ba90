"""Compile for an H200 on a machine without a GPU, and read what ptxas said about every kernel.

Needs the extra `kernels-aot` (JAX's CUDA plugin and NVIDIA's compiler, no driver) and
JAX_PLATFORMS=cpu in the environment before JAX is imported: otherwise the plugin looks for a
device, fails, and is not registered.
"""

import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

# Facts of the part: NVIDIA H200 data sheet and the CUDA programming guide, compute capability 9.0.
SHARED_MEMORY_LIMIT = 232448  # bytes a thread block may ask for
SHARED_MEMORY_PER_SM = 233472  # bytes
SHARED_MEMORY_RESERVED = 1024  # bytes per thread block, kept by the driver
REGISTERS_PER_SM = 65536
THREADS_PER_SM = 2048
BLOCKS_PER_SM = 32
MULTIPROCESSORS = 132

H200 = """
gpu_device_info {
  device_vendor: "NVIDIA Corporation"
  name: "NVIDIA H200"
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  device_address_bits: 64
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""


class AotError(RuntimeError):
    """The compile for an H200 cannot be done here; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One GPU kernel as ptxas left it; memory in bytes, threads per block, registers per thread."""

    name: str
    registers: int
    spill_stores: int
    spill_loads: int
    shared_memory: int
    threads: int
    ptx: str

    @property
    def spills(self) -> int:
        return self.spill_stores + self.spill_loads

    @property
    def blocks_per_sm(self) -> int:
        """How many thread blocks a multiprocessor holds at once."""
        warps = -(-self.threads // 32)
        registers = warps * (-(-self.registers * 32 // 256) * 256)
        shared = self.shared_memory + SHARED_MEMORY_RESERVED
        return min(
            REGISTERS_PER_SM // registers,
            SHARED_MEMORY_PER_SM // shared,
            THREADS_PER_SM // self.threads,
            BLOCKS_PER_SM,
        )

    @property
    def occupancy(self) -> float:
        """Resident threads over the most that a multiprocessor holds."""
        return self.blocks_per_sm * self.threads / THREADS_PER_SM


@functools.cache
def topology(devices: int = 1) -> Any:
    """The description of `devices` H200s in one host; AotError without the compiler."""
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        raise AotError("set JAX_PLATFORMS=cpu before JAX is imported")
    try:
        return topologies.get_topology_desc(
            "h200", platform="cuda", topology=f"1x1x{devices}", target_config=H200
        )
    except Exception as error:
        raise AotError(f"no CUDA compiler: install the extra kernels-aot ({error})") from error


def mesh(devices: int = 1, axis: str = "tensor") -> jax.sharding.Mesh:
    """A one-dimensional mesh of H200s that are not there."""
    return topologies.make_mesh(topology(devices), (devices,), (axis,))


def placed(
    arguments: Sequence[Any], on: jax.sharding.Mesh, specs: Sequence[PartitionSpec] | None = None
) -> list[jax.ShapeDtypeStruct]:
    """The arguments' shapes, placed on a mesh; replicated without specs."""
    chosen = specs or [PartitionSpec()] * len(arguments)
    return [
        jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=NamedSharding(on, spec))
        for x, spec in zip(arguments, chosen, strict=True)
    ]


def compile_for_h200(
    function: Callable[..., Any],
    *arguments: Any,
    devices: int = 1,
    specs: Sequence[PartitionSpec] | None = None,
    donate_argnums: Sequence[int] = (),
) -> tuple[jax.stages.Compiled, list[Kernel]]:
    """The executable and its kernels, XLA's own among them.

    arguments: arrays or shapes; specs: how they are placed on a mesh of `devices` with the axis
    "tensor". Mosaic keeps compiled kernels for the life of a process: one compiled before is
    missing from the list.
    """
    on = mesh(devices)
    with tempfile.TemporaryDirectory(prefix="aot_") as folder:
        dumps = {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTXAS": "1"}
        before = {name: os.environ.get(name) for name in dumps}
        os.environ.update(dumps)
        try:
            with jax.sharding.use_abstract_mesh(on.abstract_mesh):
                traced = jax.jit(function, donate_argnums=donate_argnums).trace(
                    *placed(arguments, on, specs)
                )
                lowered = traced.lower()
            compiled = lowered.compile(
                compiler_options={
                    "xla_dump_to": folder,
                    "xla_dump_emitter_re": "ptx",
                    "xla_dump_hlo_as_text": True,
                }
            )
        finally:
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        return compiled, _kernels(Path(folder))


def ptxas() -> str:
    """The path of NVIDIA's assembler: that of the wheel, as XLA takes, else of the system."""
    try:
        import nvidia

        for root in nvidia.__path__:
            for path in sorted(Path(root).glob("**/bin/ptxas")):
                return str(path)
    except ImportError:
        pass
    found = shutil.which("ptxas")
    if found is None:
        raise AotError("no ptxas: install the extra kernels-aot")
    return found


def _kernels(folder: Path) -> list[Kernel]:
    """Read the dumps of one compile."""
    shared: dict[str, tuple[int, int]] = {}
    for path in folder.glob("*.thunk_sequence.txt"):
        pattern = (
            r"\] (\S+) grid:.* threads: \[(\d+), (\d+), (\d+)\]"
            r".* shared_memory: (\d+) bytes"
        )
        for name, x, y, z, size in re.findall(pattern, path.read_text()):
            shared[name] = (int(size), int(x) * int(y) * int(z))
    kernels = []
    for path in sorted(folder.glob("*.ptx")):
        text = path.read_text()
        entry = re.search(r"\.entry (\S+?)\(", text)
        if entry is None:
            continue
        log_path = path.with_suffix(".ptxas")
        if log_path.exists():
            log = log_path.read_text()
            # Numbered apart from the PTX: by lowering, not by compile.
            resources = next(folder.glob(f"{path.stem.rsplit('_', 1)[0]}_*.resources.txt"))
            size = int(_find(r"smem_scratch_bytes=(\d+)", resources.read_text())[0])
        else:
            arguments = [ptxas(), "-v", "-arch=sm_90a", str(path), "-o", os.devnull]
            done = subprocess.run(arguments, capture_output=True, text=True, check=True)
            log, size = done.stdout + done.stderr, shared.get(entry[1], (0, 0))[0]
        threads = re.search(r"\.(?:req|max)ntid (\d+)(?:, (\d+))?(?:, (\d+))?", text)
        block = [int(x) for x in threads.groups() if x] if threads else [shared[entry[1]][1]]
        spills = _find(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
        kernels.append(
            Kernel(
                name=entry[1],
                registers=int(_find(r"Used (\d+) registers", log)[0]),
                spill_stores=int(spills[0]),
                spill_loads=int(spills[1]),
                shared_memory=size,
                threads=int(np.prod(block)),
                ptx=text,
            )
        )
    return kernels


def _find(pattern: str, text: str) -> tuple[str, ...]:
    """The groups of the first match; AotError where a log does not read as it used to."""
    found = re.search(pattern, text)
    if found is None:
        raise AotError(f"no {pattern!r} in: {text[:300]}")
    return found.groups()
