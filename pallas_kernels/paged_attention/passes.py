"""The two passes of a GPU implementation, and how their rows come together.

Decode rows (requests with one query token) go through the kernel with split-K and f32 partials;
longer chunks go through it in tiles. What needs no loop over keys is done here, where XLA fuses it
into one pass over the output: sinks, the V scale, the merge of the splits, and the zeros of padding
rows.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.pool import Scale
from pallas_kernels.paged_attention.split_plan import merge_splits
from pallas_kernels.paged_attention.work_list import WorkList, decode_rows, prompt_tiles

# (q [T', H, D], work) -> (out f32 [S, T', H, D], lse f32 [S, T', H]); rows without work hold
# anything.
type DecodeKernel = Callable[[jax.Array, WorkList], tuple[jax.Array, jax.Array]]
# (q [T, H, D], work) -> (out [T, H, D], lse f32 [T, H]); rows without work hold anything.
type PromptKernel = Callable[[jax.Array, WorkList], tuple[jax.Array, jax.Array]]


def attend_in_passes(
    q: jax.Array,
    context_lens: jax.Array,
    query_starts: jax.Array,
    *,
    kv_heads: int,
    tile_tokens: int,
    decode_kernel: DecodeKernel,
    prompt_kernel: PromptKernel,
    sinks: jax.Array | None,
    v_scale: Scale,
    return_lse: bool,
    decode: bool,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """paged_attention of api.py from the two kernels. tile_tokens: query tokens per item of the
    prompt kernel.
    """
    T, H, _ = q.shape
    lengths = query_starts[1:] - query_starts[:-1]
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    single = (lengths > 0) if decode else (lengths == 1)
    rows = q if decode else q[jnp.minimum(query_starts[:-1], T - 1)]
    parts, part_lse = decode_kernel(rows, decode_rows(context_lens, single))
    # A request without work leaves its rows of the partials unwritten.
    part_lse = jnp.where(single[:, None], part_lse, -jnp.inf)
    parts = jnp.where(single[:, None, None], parts, 0.0)
    out, lse = merge_splits(parts, part_lse, sinks)
    if not decode:
        work = prompt_tiles(query_starts, context_lens, T, tile_tokens)
        tile_out, tile_lse = prompt_kernel(q, work)
        row = jnp.arange(T, dtype=jnp.int32)
        owner = jnp.searchsorted(query_starts[1:], row, side="right", method="compare_all")
        owner = owner.astype(jnp.int32)
        padding = row >= query_starts[-1]
        owner = jnp.where(padding, 0, owner)
        is_single = single[owner]
        tile_out, tile_lse = _with_sinks(tile_out, tile_lse, sinks)
        out = jnp.where(is_single[:, None, None], out[owner], tile_out)
        lse = jnp.where(is_single[:, None], lse[owner], tile_lse)
        out = jnp.where(padding[:, None, None], 0.0, out)
        lse = jnp.where(padding[:, None], -jnp.inf, lse)
    if v_scale is not None:
        factor = jnp.broadcast_to(jnp.asarray(v_scale, jnp.float32), (kv_heads,))
        out = out * jnp.repeat(factor, H // kv_heads)[:, None]
    out = out.astype(q.dtype)
    return (out, lse) if return_lse else out


def _with_sinks(
    out: jax.Array, lse: jax.Array, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Enlarge the denominators of out [T, H, D] and lse [T, H] by the sinks."""
    out = out.astype(jnp.float32)
    if sinks is None:
        return out, lse
    with_sink = jnp.logaddexp(lse, sinks)
    return out * jnp.exp(lse - with_sink)[..., None], with_sink
