"""Which key tiles a work item walks: bounds instead of masks.

Plain scalar arithmetic that runs inside a kernel, and outside one for whoever counts bytes and
FLOPs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class TileBounds(NamedTuple):
    """i32 scalars. Tile numbers count from the start of the context.

    Tiles first .. last - 1 hold the keys that some row sees; of these, whole_from .. whole_to - 1
    are seen by every row in full and need no mask. Keys lowest .. end - 1 are the ones that may be
    read.
    """

    lowest: jax.Array
    end: jax.Array
    first: jax.Array
    whole_from: jax.Array
    whole_to: jax.Array
    last: jax.Array


def tile_bounds(
    first_position: jax.Array,
    tokens: jax.Array,
    split: jax.Array,
    *,
    keys: int,
    splits: int,
    window: int | None,
) -> TileBounds:
    """The bounds of `tokens` query tokens from `first_position` on, for one of `splits` shares.

    The shares are even. keys: keys per tile; a window is that of api.paged_attention.
    """
    end = first_position + tokens
    lowest = jnp.int32(0) if window is None else jnp.maximum(first_position - (window - 1), 0)
    start, stop = _floor(lowest, keys), _ceil(end, keys)
    share = _ceil(stop - start, splits)
    first = start + split * share
    last = jnp.minimum(first + share, stop)
    whole_from = first
    if window is not None:
        # The last row's window starts at end - window.
        whole_from = _clip(_ceil(jnp.maximum(end - window, 0), keys), first, last)
    whole_to = _clip(_floor(first_position + 1, keys), whole_from, last)
    return TileBounds(lowest, end, first, whole_from, whole_to, last)


def _floor(x: jax.Array, by: int) -> jax.Array:
    # Operands are never negative, where lax.div and floor division agree.
    return lax.div(x, jnp.int32(by))


def _ceil(x: jax.Array, by: int) -> jax.Array:
    return lax.div(x + jnp.int32(by - 1), jnp.int32(by))


def _clip(x: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    return jnp.minimum(jnp.maximum(x, low), jnp.maximum(high, low))
