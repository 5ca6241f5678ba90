"""Sums along the last axis whose order of addition depends on that axis alone.

XLA:CPU chooses how to vectorise a reduction from all of an array's axes, so the sum of a row can
differ in its last bits with the number of rows beside it. Additions of whole slices leave it no
choice: each is elementwise, and floating-point additions are not reassociated. Where a program is
compiled for another platform, these are the compiler's own reductions.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import cpu_library

# Widths an array is folded to, one after the other: the first pass reads everything, in vectors.
_WIDTHS = (1024, 64, 8, 1)


def ordered_sum(x: jax.Array) -> jax.Array:
    """x [..., N] -> [...]: the sum of the last axis, each row's bits independent of the others."""
    if not cpu_library.compiling_for_cpu():
        return jnp.sum(x, axis=-1)
    for width in _WIDTHS:
        x = _fold(x, width)
    return x[..., 0]


def ordered_cumsum(x: jax.Array) -> jax.Array:
    """x [..., N] -> [..., N]: running sums of the last axis, as ordered_sum."""
    if not cpu_library.compiling_for_cpu():
        return jnp.cumsum(x, axis=-1)
    shift = 1
    while shift < x.shape[-1]:
        shifted = jnp.concatenate([jnp.zeros_like(x[..., :shift]), x[..., :-shift]], axis=-1)
        x = lax.optimization_barrier(x + shifted)
        shift *= 2
    return x


def _fold(x: jax.Array, width: int) -> jax.Array:
    """Adds the slices of `width` columns of x [..., N], the last one filled up with zeros."""
    size = x.shape[-1]
    if size <= width:
        return x
    missing = -size % width
    if missing:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    total = x[..., :width]
    for start in range(width, size, width):
        total = total + x[..., start : start + width]
    # Without the barrier one loop would compute all of a row for each of its results.
    return lax.optimization_barrier(total)
