"""Weights of a CPU in huge pages.

A decode step reads every weight once, so it runs at the speed of memory, and of that the processor
spends a large part on walking page tables where pages have 4 KiB; most of all in a virtual machine,
whose page tables are themselves looked up in others. Figures are in docs/cpu_kernels.md.
"""

import logging
import mmap

import jax
import numpy as np

from jaxllm.execution.parameters import Params

logger = logging.getLogger(__name__)

# XLA takes over the memory of a NumPy array as it is if it is aligned like this.
_ALIGNMENT = 64
_HUGE_PAGE = 2 << 20


def in_huge_pages(params: Params) -> Params:
    """The same parameters in one piece of memory that the kernel is asked to back by huge pages
    (Linux, transparent huge pages set to `madvise` or `always`).

    `params` is emptied on the way, so that each array can be let go of once it is copied. Where
    there is nothing to gain or it cannot be done (other devices, several of them, less than a huge
    page, another system) the arrays come back as they are.
    """
    arena = _arena(params)
    if arena is None:
        return params
    [device] = next(iter(params.values())).devices()
    placed: Params = {}
    start = 0
    for name in list(params):
        source = np.asarray(params.pop(name))
        place = arena[start : start + source.nbytes].view(source.dtype).reshape(source.shape)
        np.copyto(place, source)
        placed[name] = jax.device_put(place, device)
        start += _padded(source.nbytes)
    return placed


def _arena(params: Params) -> np.ndarray | None:
    """Bytes for all parameters, or None where they should stay where they are."""
    devices = {device for array in params.values() for device in array.devices()}
    size = sum(_padded(array.nbytes) for array in params.values())
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or len(devices) != 1 or size < _HUGE_PAGE:
        return None
    if next(iter(devices)).platform != "cpu":
        return None
    memory = mmap.mmap(-1, size)
    try:
        memory.madvise(advice)
    except OSError as error:
        logger.debug("no huge pages for the weights: %s", error)
        return None
    return np.frombuffer(memory, np.uint8)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
