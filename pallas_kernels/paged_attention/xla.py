"""Paged attention in plain XLA: right everywhere, and what the others are compared with.

Two passes, each a loop with a dynamic trip count, so that work follows the live tokens and not the
padding: requests with one query token go together, and longer chunks go in tiles of query tokens.
Both keep the online softmax (Milakov and Gimelshein, arXiv:1805.02867; FlashAttention,
arXiv:2205.14135) in f32 and read the pool a few blocks at a time, so no pool-sized value exists.
Key steps lie at fixed positions of a request's own context, so a row's result does not depend on
what else is in the batch.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.paged_attention.contract import Case
from pallas_kernels.paged_attention.pool import Scale, widen

KEYS_PER_STEP = 128
TOKENS_PER_TILE = 64
MASKED = -1e30


class _Options(NamedTuple):
    """What one step of the softmax needs beside its operands."""

    scale: float
    window: int | None
    soft_cap: float | None
    kv_dtype: np.dtype
    k_scale: Scale
    v_scale: Scale


class _Softmax(NamedTuple):
    """Online softmax: running maximum and denominator [..., rows], sum of values [..., rows, D]."""

    peak: jax.Array
    denominator: jax.Array
    accumulator: jax.Array


def unavailable() -> str | None:
    """Why this implementation cannot run in this process: it always can."""
    return None


def refusal(case: Case) -> str | None:
    """Why this implementation cannot do `case`: it can do every case of the contract."""
    del case
    return None


def attend(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_starts: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    return_lse: bool = False,
    decode: bool = False,
    kv_dtype: np.dtype,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """paged_attention of api.py, in plain XLA."""
    T, H, D = q.shape
    K = k_pool.shape[1]
    options = _Options(scale, window, soft_cap, kv_dtype, k_scale, v_scale)
    queries = q.astype(jnp.float32).reshape(T, K, H // K, D)
    # Inside shard_map the loop state must vary over the mesh as q does: a zero made of q does, a
    # constant does not.
    zero = jnp.where(queries[0, 0, 0, 0] == 0, 0.0, 0.0)
    arguments = (k_pool, v_pool, block_tables, context_lens, options, zero)
    lengths = query_starts[1:] - query_starts[:-1]
    if decode:
        state = _decode_pass(queries, *arguments, live=lengths > 0)
    else:
        state = _tile_pass(queries, query_starts, *arguments)
        rows = jnp.clip(query_starts[:-1], 0, T - 1)
        single = _decode_pass(queries[rows], *arguments, live=lengths == 1)
        rows = jnp.where(lengths == 1, rows, T)
        state = _Softmax(
            *(x.at[rows].set(y, mode="drop") for x, y in zip(state, single, strict=True))
        )
    return _finish(state, q, sinks, v_scale, return_lse)


def _finish(
    state: _Softmax, q: jax.Array, sinks: jax.Array | None, v_scale: Scale, return_lse: bool
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Divide by the denominator, sinks included; rows that saw no key become zero."""
    T, H, D = q.shape
    K, G = state.peak.shape[1:]
    empty = state.denominator == 0
    peak, denominator, accumulator = state
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(K, G)
        new_peak = jnp.maximum(peak, sink)
        shrink = jnp.exp(peak - new_peak)
        denominator = denominator * shrink + jnp.exp(sink - new_peak)
        accumulator = accumulator * shrink[..., None]
        peak = new_peak
    safe = jnp.where(empty, 1.0, denominator)
    out = jnp.where(empty[..., None], 0.0, accumulator / safe[..., None])
    if v_scale is not None:
        out = out * _per_head(v_scale, K)[:, None, None]
    out = out.reshape(T, H, D).astype(q.dtype)
    if not return_lse:
        return out
    lse = jnp.where(empty, -jnp.inf, peak + jnp.log(safe))
    return out, lse.reshape(T, H)


def _per_head(scale: Scale, kv_heads: int) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(scale, jnp.float32), (kv_heads,))


def _initial(zero: jax.Array, rows: tuple[int, ...], dim: int) -> _Softmax:
    return _Softmax(
        jnp.full(rows, MASKED, jnp.float32) + zero,
        jnp.zeros(rows, jnp.float32) + zero,
        jnp.zeros((*rows, dim), jnp.float32) + zero,
    )


def _gather(pool: jax.Array, blocks: jax.Array, kv_dtype: np.dtype) -> jax.Array:
    """Blocks i32[..., N] of the pool as f32 [..., K, N * B, D].

    The index names (block, head) pairs in the order the dot wants them, so that no transposition
    follows.
    """
    P, K, B, D = pool.shape
    index = blocks[..., None, :] * K + jnp.arange(K, dtype=jnp.int32)[:, None]
    tiles = pool.reshape(P * K, B, D).at[index].get(mode="clip")
    return widen(tiles.reshape(*index.shape[:-1], -1, D), kv_dtype)


def _step(
    state: _Softmax,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    visible: jax.Array,
    options: _Options,
) -> _Softmax:
    """One step of the online softmax over keys and values [..., K, C, D].

    queries [..., K, N, D]; visible, broadcastable to [..., K, N, C], says which keys a row may see.
    A row that sees none is left as it was, bit for bit.
    """
    logits = jnp.einsum("...nd,...cd->...nc", queries, keys) * options.scale
    if options.k_scale is not None:
        logits = logits * _per_head(options.k_scale, keys.shape[-3])[:, None, None]
    if options.soft_cap is not None:
        logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
    logits = jnp.where(visible, logits, MASKED)
    peak = jnp.maximum(state.peak, logits.max(-1))
    weights = jnp.where(visible, jnp.exp(logits - peak[..., None]), 0.0)
    shrink = jnp.exp(state.peak - peak)
    return _Softmax(
        peak,
        state.denominator * shrink + weights.sum(-1),
        state.accumulator * shrink[..., None] + jnp.einsum("...nc,...cd->...nd", weights, values),
    )


def _decode_pass(
    queries: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    options: _Options,
    zero: jax.Array,
    *,
    live: jax.Array,
) -> _Softmax:
    """Attention of one query row per request, queries [R, K, G, D]; requests that are not `live`
    bool[R] cost nothing.
    """
    R, K, G, D = queries.shape
    table, step_blocks, keys_per_step = _padded_table(block_tables, k_pool.shape[2])
    end = jnp.where(live, context_lens, 0)
    begin = jnp.zeros_like(end) if options.window is None else jnp.maximum(end - options.window, 0)
    offsets = jnp.arange(keys_per_step, dtype=jnp.int32)

    def step(i: jax.Array, state: _Softmax) -> _Softmax:
        blocks = lax.dynamic_slice(table, (0, i * step_blocks), (R, step_blocks))
        positions = i * keys_per_step + offsets
        seen = (positions < end[:, None]) & (positions >= begin[:, None])
        keys = _gather(k_pool, blocks, options.kv_dtype)
        # A slot outside the context may hold anything, and zero times NaN is NaN.
        values = jnp.where(seen[:, None, :, None], _gather(v_pool, blocks, options.kv_dtype), 0.0)
        return _step(state, queries, keys, values, seen[:, None, None, :], options)

    first = jnp.min(jnp.where(end > 0, begin, jnp.iinfo(jnp.int32).max)) // keys_per_step
    last = (jnp.max(end) + keys_per_step - 1) // keys_per_step
    return lax.fori_loop(first, last, step, _initial(zero, (R, K, G), D))


def _padded_table(block_tables: jax.Array, block_size: int) -> tuple[jax.Array, int, int]:
    """The block table, padded to whole steps, the blocks per step, and the keys per step."""
    width = block_tables.shape[1]
    step_blocks = min(max(KEYS_PER_STEP // block_size, 1), width)
    missing = -width % step_blocks
    return jnp.pad(block_tables, ((0, 0), (0, missing))), step_blocks, step_blocks * block_size


def _tile_pass(
    queries: jax.Array,
    query_starts: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    options: _Options,
    zero: jax.Array,
) -> _Softmax:
    """Attention of the requests with several query tokens, tile by tile, queries [T, K, G, D].

    Tiles are taken in the order of their rows, and a tile's rows past the end of its request hold
    nothing: they are either padding or overwritten by the tiles that follow.
    """
    T, K, G, D = queries.shape
    tile = min(TOKENS_PER_TILE, T)
    lengths = query_starts[1:] - query_starts[:-1]
    tile_ends = jnp.cumsum(jnp.where(lengths > 1, (lengths + tile - 1) // tile, 0))
    table, step_blocks, keys_per_step = _padded_table(block_tables, k_pool.shape[2])
    padded = jnp.pad(queries, ((0, tile), (0, 0), (0, 0), (0, 0)))
    offsets = jnp.arange(keys_per_step, dtype=jnp.int32)

    def one_tile(i: jax.Array, results: _Softmax) -> _Softmax:
        r = jnp.searchsorted(tile_ends, i, side="right", method="compare_all")
        r = r.astype(jnp.int32)
        ordinal = i - jnp.where(r > 0, tile_ends[r - 1], 0)
        start = query_starts[r] + ordinal * tile
        context = context_lens[r]
        first_position = context - lengths[r] + ordinal * tile
        rows = (
            lax.dynamic_slice_in_dim(padded, start, tile)
            .transpose(1, 2, 0, 3)
            .reshape(K, G * tile, D)
        )
        live = jnp.minimum(query_starts[r + 1] - start, tile)
        token = jnp.arange(tile, dtype=jnp.int32)
        # A row without a token sees no key: its position lies before the first.
        position = jnp.tile(jnp.where(token < live, first_position + token, -1), G)[:, None]
        lowest = (
            0 if options.window is None else jnp.maximum(first_position - options.window + 1, 0)
        )
        end = first_position + live

        def step(j: jax.Array, state: _Softmax) -> _Softmax:
            blocks = lax.dynamic_slice(table, (r, j * step_blocks), (1, step_blocks))[0]
            keys_at = j * keys_per_step + offsets
            visible = keys_at <= position
            if options.window is not None:
                visible &= keys_at > position - options.window
            inside = (keys_at < end) & (keys_at >= lowest)
            keys = _gather(k_pool, blocks, options.kv_dtype)
            values = jnp.where(inside[:, None], _gather(v_pool, blocks, options.kv_dtype), 0.0)
            return _step(state, rows, keys, values, visible, options)

        last = (end + keys_per_step - 1) // keys_per_step
        state = lax.fori_loop(lowest // keys_per_step, last, step, _initial(zero, (K, G * tile), D))
        place = partial(_place, start=start, tile=tile, group=G)
        return _Softmax(*(place(x, y) for x, y in zip(results, state, strict=True)))

    results = lax.fori_loop(0, tile_ends[-1], one_tile, _initial(zero, (T + tile, K, G), D))
    return _Softmax(*(x[:T] for x in results))


def _place(
    results: jax.Array, tile_state: jax.Array, *, start: jax.Array, tile: int, group: int
) -> jax.Array:
    """Write a tile's rows [K, G * tile, ...] to results [T + tile, K, G, ...] from row `start`."""
    rows = tile_state.reshape(tile_state.shape[0], group, tile, *tile_state.shape[2:])
    return lax.dynamic_update_slice_in_dim(results, jnp.moveaxis(rows, 2, 0), start, 0)
