"""Split-K for decode: into how many parts a context is cut, and how the parts become one.

A decode step has one work item per request and KV head, which at small batches is fewer than a GPU
has multiprocessors. Cutting the contexts fills the machine (Flash-Decoding); each part leaves its
normalised output and the logarithm of its denominator in f32, and a weighted sum merges them. The
count is static, so that one program serves a whole bucket.
"""

import jax
import jax.numpy as jnp

# Below this many key tiles a split costs more in partial outputs than it saves.
FEWEST_TILES_TO_SPLIT = 4
# Work items per multiprocessor slot from which the machine counts as full without splitting.
FULL_ENOUGH = 0.8
# How much of the best wave efficiency the smallest split count must reach.
GOOD_ENOUGH = 0.85
MOST_SPLITS = 64


def num_splits(work_items: int, max_tiles: int, slots: int) -> int:
    """The number of parts for contexts of up to `max_tiles` key tiles.

    work_items: requests times KV heads of the bucket; slots: thread blocks that run at once. The
    rule is that of FlashAttention-3: one part where the work items nearly fill the machine, else
    the smallest count whose last wave is filled nearly as well as with the best count.
    """
    if work_items >= FULL_ENOUGH * slots or max_tiles <= FEWEST_TILES_TO_SPLIT:
        return 1
    candidates = range(1, min(MOST_SPLITS, slots, max_tiles) + 1)
    efficiency = {}
    for splits in candidates:
        waves = work_items * splits / slots
        efficiency[splits] = waves / -(-work_items * splits // slots)
    best = max(efficiency.values())
    return next(s for s in candidates if efficiency[s] >= GOOD_ENOUGH * best)


def merge_splits(
    out: jax.Array, lse: jax.Array, sinks: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """One (out f32[R, H, D], lse f32[R, H]) of the parts out f32[S, R, H, D], lse f32[S, R, H].

    An empty part has lse minus infinity and weighs nothing. sinks f32[H] join the denominator.
    Where every part is empty, out is zero and lse minus infinity.
    """
    peak = lse.max(0)
    empty = peak == -jnp.inf
    if sinks is not None:
        peak = jnp.maximum(peak, sinks)
    peak = jnp.where(empty, 0.0, peak)
    weights = jnp.exp(lse - peak)
    denominator = weights.sum(0)
    if sinks is not None:
        denominator += jnp.exp(sinks - peak)
    safe = jnp.where(empty, 1.0, denominator)
    merged = (out * weights[..., None]).sum(0) / safe[..., None]
    merged = jnp.where(empty[..., None], 0.0, merged)
    return merged, jnp.where(empty, -jnp.inf, peak + jnp.log(safe))
