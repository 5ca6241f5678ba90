"""Weights of a CPU in huge pages.

A decode step reads every weight once, so it runs at the speed of memory, and of that the processor
spends a large part on walking page tables where pages have 4 KiB; most of all in a virtual machine,
whose page tables are themselves looked up in others. Figures are in docs/cpu_kernels.md.
"""

import logging
import math
import mmap
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxllm.execution.parameters import Params

logger = logging.getLogger(__name__)

# XLA takes over the memory of a NumPy array as it is if it is aligned like this.
_ALIGNMENT = 64
_HUGE_PAGE = 2 << 20


class Arena:
    """One piece of memory for all parameters, which the kernel is asked to back by huge pages."""

    def __init__(self, memory: np.ndarray, device: jax.Device):
        self._memory = memory
        self._device = device

    def fill(self, params: Params) -> Params:
        """Copies of `params` in this memory; nothing is shared with them.

        `params` is emptied on the way, so that each array can be let go of once it is copied.

        Args:
          params: of the shapes and dtypes that the arena was made for.
        """
        placed: Params = {}
        start = 0
        for name in list(params):
            source = np.asarray(params.pop(name))
            end = start + source.nbytes
            place = self._memory[start:end].view(source.dtype).reshape(source.shape)
            np.copyto(place, source)
            placed[name] = jax.device_put(place, self._device)
            start += _padded(source.nbytes)
        return placed


def arena_for(params: Mapping[str, jax.Array | jax.ShapeDtypeStruct]) -> Arena | None:
    """Memory for parameters of these shapes, dtypes and shardings (Linux, transparent huge pages
    set to `madvise` or `always`).

    None where there is nothing to gain or it cannot be done: other devices, several of them, less
    than a huge page, another system. Memory that is not filled costs none.
    """
    devices: set[Any] = {d for leaf in params.values() for d in _sharding(leaf).device_set}
    size = sum(_padded(math.prod(leaf.shape) * leaf.dtype.itemsize) for leaf in params.values())
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or len(devices) != 1 or size < _HUGE_PAGE:
        return None
    [device] = devices
    if device.platform != "cpu":
        return None
    memory = mmap.mmap(-1, size)
    try:
        memory.madvise(advice)
    except OSError as error:
        logger.debug("no huge pages for the weights: %s", error)
        return None
    return Arena(np.frombuffer(memory, np.uint8), device)


def in_huge_pages(params: Params) -> Params:
    """The same parameters in an arena, if there is one for them; else they come back as they are.

    `params` is emptied where they are copied.
    """
    arena = arena_for(params)
    return params if arena is None else arena.fill(params)


def _sharding(leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.sharding.Sharding:
    if leaf.sharding is None:
        raise ValueError(f"{leaf}: no sharding")
    return leaf.sharding


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
