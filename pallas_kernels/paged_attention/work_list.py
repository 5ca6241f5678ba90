"""The work of one call as lists of static length: which rows of q a thread block takes.

Requests with one query token are decode rows, one item each; longer chunks are cut into tiles of
query tokens, aligned to the start of the chunk, so that a row's result does not depend on its
neighbours in the batch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class WorkList(NamedTuple):
    """W work items, each i32[W]."""

    request: jax.Array  # whose block table
    row: jax.Array  # first row of q
    tokens: jax.Array  # query tokens; 0 is an item without work
    position: jax.Array  # position in the context of the first query token


def decode_rows(context_lens: jax.Array, live: jax.Array) -> WorkList:
    """One item per request i32[R], its row of q being its own number.

    An item is without work where not live bool[R].
    """
    request = jnp.arange(context_lens.shape[0], dtype=jnp.int32)
    return WorkList(request, request, live.astype(jnp.int32), context_lens - 1)


def prompt_tiles(
    query_starts: jax.Array, context_lens: jax.Array, tokens: int, tile: int
) -> WorkList:
    """Tiles of up to `tile` tokens over the requests with several query tokens.

    tokens: T. The list is as long as it can ever need to be: cdiv(T, tile) full tiles and one
    ragged tile per request.
    """
    lengths = query_starts[1:] - query_starts[:-1]
    tiles = jnp.where(lengths > 1, (lengths + tile - 1) // tile, 0)
    ends = jnp.cumsum(tiles)
    length = -(-tokens // tile) + min(lengths.shape[0], tokens // 2)
    item = jnp.arange(length, dtype=jnp.int32)
    # Compared with all at once: a binary search is a loop of small kernels.
    request = jnp.searchsorted(ends, item, side="right", method="compare_all")
    request = request.astype(jnp.int32)
    live = item < ends[-1]
    request = jnp.where(live, request, 0)
    done = (item - (ends - tiles)[request]) * tile
    return WorkList(
        request,
        jnp.where(live, query_starts[request] + done, 0).astype(jnp.int32),
        jnp.where(live, jnp.minimum(lengths[request] - done, tile), 0).astype(jnp.int32),
        (context_lens[request] - lengths[request] + done).astype(jnp.int32),
    )


def tiles_of_rows(query_starts: jax.Array, tokens: int, tile: int) -> tuple[jax.Array, jax.Array]:
    """For every row of q: its item of `prompt_tiles` and its token there, i32[T] each.

    tokens: T. Rows that no tile holds get any item.
    """
    row = jnp.arange(tokens, dtype=jnp.int32)
    request = jnp.searchsorted(query_starts[1:], row, side="right", method="compare_all")
    request = jnp.minimum(request.astype(jnp.int32), query_starts.shape[0] - 2)
    lengths = query_starts[1:] - query_starts[:-1]
    tiles = jnp.where(lengths > 1, (lengths + tile - 1) // tile, 0)
    before = (jnp.cumsum(tiles) - tiles)[request]
    place = row - query_starts[request]
    return before + place // tile, place % tile
