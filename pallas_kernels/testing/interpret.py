"""Run the GPU kernels on a CPU: Triton's by plain XLA, Mosaic's by JAX's GPU interpreter.

The interpreter detects races, and keeps state for the life of a process, which an exception leaves
dirty; the functions that reset it and read the races found are private in JAX, and named here only.
Each warpgroup is a thread that may wait inside XLA's thread pool: the pool must have more threads
than a kernel has warpgroups, or the last one never starts. Its size is that of the machine, or the
number of fake devices that XLA_FLAGS=--xla_force_host_platform_device_count sets, if greater.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import mosaic, triton


class RaceError(RuntimeError):
    """The interpreter saw two unordered accesses to the same memory, one of them a write."""


def triton_attend(**options: Any) -> Callable[..., Any]:
    """`attend` of triton.py, interpreted."""
    return functools.partial(triton.attend, interpret=True, **options)


def mosaic_attend(**options: Any) -> Callable[..., Any]:
    """`attend` of mosaic.py, interpreted; call it inside `race_detection`."""
    return functools.partial(
        mosaic.attend, interpret=plgpu.InterpretGPUParams(detect_races=True), **options
    )


@contextmanager
def race_detection() -> Iterator[None]:
    """Start the GPU interpreter afresh, and raise RaceError at the end if it found races."""
    interpret_pallas_call.reset_gpu_interpret_mode_state()
    try:
        yield
        if interpret_pallas_call.get_races().races_found:
            raise RaceError("races in shared or global memory")
    finally:
        interpret_pallas_call.reset_gpu_interpret_mode_state()
