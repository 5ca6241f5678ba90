"""Accelerators by name: what their makers' data sheets say."""

import dataclasses

from jaxllm.errors import ConfigError
from jaxllm.planning.arithmetic import GIB


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU model.

    Attributes:
      memory_gib: memory as the driver reports it, in GiB; the data sheet's GB minus what error
        correction and the firmware keep.
      bandwidth_gbs: peak memory bandwidth, GB/s (10^9).
      bf16_tflops: peak dense bfloat16 tensor throughput with float32 accumulation, TFLOP/s.
      link_gbs: GB/s in one direction between GPUs of one host: NVLink where the part has it, else
        PCIe.
      compute_capability: CUDA compute capability.
      multiprocessors: streaming multiprocessors.
      l2_mib: L2 cache, MiB.
      source: where the numbers come from.
    """

    name: str
    memory_gib: float
    bandwidth_gbs: float
    bf16_tflops: float
    link_gbs: float
    compute_capability: str
    multiprocessors: int
    l2_mib: int
    source: str

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * GIB)


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("A10", 22.5, 600, 125, 32, "8.6", 72, 6, "NVIDIA A10 data sheet"),
        Gpu("L4", 22.5, 300, 121, 32, "8.9", 58, 48, "NVIDIA L4 data sheet"),
        Gpu("L40S", 45.0, 864, 362, 32, "8.9", 142, 96, "NVIDIA L40S data sheet"),
        Gpu("RTX-4090", 24.0, 1008, 165, 32, "8.9", 128, 72, "NVIDIA Ada GPU architecture paper"),
        Gpu("A100-40", 39.6, 1555, 312, 300, "8.0", 108, 40, "NVIDIA A100 data sheet, SXM 40 GB"),
        Gpu("A100-80", 80.0, 2039, 312, 300, "8.0", 108, 40, "NVIDIA A100 data sheet, SXM 80 GB"),
        Gpu("H100", 79.6, 3350, 989, 450, "9.0", 132, 50, "NVIDIA H100 data sheet, SXM 80 GB"),
        Gpu("H200", 140.4, 4800, 989, 450, "9.0", 132, 50, "NVIDIA H200 data sheet, SXM"),
        Gpu(
            "B200", 179.1, 8000, 2250, 900, "10.0", 148, 126, "NVIDIA DGX B200 data sheet, per GPU"
        ),
    )
}


def find_gpu(name: str) -> Gpu:
    """The GPU of this name; case, spaces, "NVIDIA", "GB" and separators do not count.

    Raises:
      ConfigError: no such GPU; the message lists the known ones.
    """
    wanted = _plain(name)
    for gpu in GPUS.values():
        if _plain(gpu.name) == wanted:
            return gpu
    raise ConfigError(
        f"GPU {name!r} is not in the table; known: {', '.join(GPUS)} (or give a memory size)"
    )


def _plain(name: str) -> str:
    text = name.lower()
    for noise in ("nvidia", "geforce", "gb", "-", "_", " "):
        text = text.replace(noise, "")
    return text
