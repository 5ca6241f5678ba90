"""The sampler: from logits [R, V] to token ids [R], one program per need.

A draw uses one uniform number, which depends on the request's seed and the position of the token
alone (jaxllm.execution.noise).
The order of operations is temperature, min-p, top-k, top-p.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.execution.batch import GREEDY, RANDOM, SamplingFields
from pallas_kernels import cpu_library
from pallas_kernels.ordered import ordered_cumsum, ordered_sum
from pallas_kernels.sampling import (
    inverse_cdf_draw,
    two_stage_argmax,
    two_stage_top_k,
)

# Candidates that truncated sampling looks at first; rows whose kept set may be larger take the
# path over the whole vocabulary.
NUM_CANDIDATES = 64


def sample(logits: jax.Array, fields: SamplingFields, need: int) -> tuple[jax.Array, jax.Array]:
    """Draws a token per row of float32 logits [R, V], with the fields of the same R rows.

    Returns token ids int32 [R] and floors float32 [R]: the least logit, divided by temperature,
    that was kept for the draw; minus infinity where all were.
    """
    greedy_ids = two_stage_argmax(logits)
    nothing_cut = jnp.full(greedy_ids.shape, -jnp.inf)
    if need == GREEDY:
        return greedy_ids, nothing_cut
    temperature = _floats(fields.temperature)
    is_greedy = temperature == 0.0
    scaled = logits / jnp.where(is_greedy, 1.0, temperature)[:, None]
    uniform = _floats(fields.uniform)
    if need == RANDOM:
        ids, floor = inverse_cdf_draw(scaled, uniform), nothing_cut
    else:
        ids, floor = _sample_truncated(
            scaled, uniform, is_greedy, fields.top_k, _floats(fields.top_p), _floats(fields.min_p)
        )
    return jnp.where(is_greedy, greedy_ids, ids), jnp.where(is_greedy, -jnp.inf, floor)


def _floats(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _sample_truncated(
    scaled: jax.Array,
    uniform: jax.Array,
    is_greedy: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Draws from what min-p, top-k and top-p leave of softmax(scaled): ids and floors [R].

    A row whose kept set lies inside its most probable candidates is drawn from those, in falling
    order; another, and one without truncation, is drawn from the vocabulary, in order of ids. Which
    of the two depends on the row alone. What greedy rows get has no meaning.
    """
    size = scaled.shape[-1]
    num_candidates = min(NUM_CANDIDATES, size)
    values, ids = two_stage_top_k(scaled, num_candidates)
    best = values[:, :1]
    # min-p and top-k each keep what is at or above a value; -inf keeps everything.
    floor = jnp.where(min_p > 0, best[:, 0] + jnp.log(min_p), -jnp.inf)
    limited = (top_k > 0) & (top_k < size)
    kth = jnp.take_along_axis(values, jnp.clip(top_k - 1, 0, num_candidates - 1)[:, None], 1)
    floor = jnp.maximum(floor, jnp.where(limited & (top_k <= num_candidates), kth[:, 0], -jnp.inf))
    outside_k = limited & (top_k > num_candidates)

    weights = jnp.exp(scaled - best)
    kept_mass = ordered_sum(jnp.where(scaled >= floor[:, None], weights, 0.0))
    candidate_weights = jnp.where(values >= floor[:, None], jnp.exp(values - best), 0.0)
    upto = ordered_cumsum(candidate_weights)
    target = top_p * kept_mass
    all_inside = (floor > values[:, -1]) | (num_candidates == size)
    inside = (all_inside | (upto[:, -1] >= target)) & ~outside_k

    nucleus = jnp.where(upto - candidate_weights < target[:, None], candidate_weights, 0.0)
    drawn = _draw(nucleus, uniform)
    from_candidates = jnp.take_along_axis(ids, drawn[:, None], axis=1)[:, 0]
    least = jnp.min(jnp.where(nucleus > 0, values, jnp.inf), axis=-1)

    # A row without truncation is drawn as in a batch without truncation.
    whole = (top_k == 0) & (top_p >= 1.0) & (min_p == 0.0)
    inside = (inside & ~whole) | is_greedy
    k = jnp.where(outside_k, top_k, size)
    floor = jnp.where(whole, -jnp.inf, floor)
    rows = (scaled, uniform, floor, k, top_p, whole)
    return _replace(inside, (from_candidates, least), rows)


def _replace(
    good: jax.Array, drawn: tuple[jax.Array, jax.Array], rows: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    """Ids and floors `drawn` [R], but from the whole vocabulary for rows that are not `good`.

    On a CPU such rows come one after the other: a row stays in the cache while it is searched, and
    the others cost nothing.
    """
    if not cpu_library.compiling_for_cpu():
        ids, floors = lax.cond(jnp.all(good), lambda _: drawn, lambda r: _draw_from_all(*r), rows)
        return jnp.where(good, drawn[0], ids), jnp.where(good, drawn[1], floors)
    order = jnp.argsort(good)

    def one(i: jax.Array, results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        row = order[i]
        values = _draw_from_all(*(lax.dynamic_slice_in_dim(x, row, 1) for x in rows))
        ids, floors = (x.at[row].set(y[0]) for x, y in zip(results, values, strict=True))
        return ids, floors

    return lax.fori_loop(0, jnp.sum(~good), one, drawn)


def _draw_from_all(
    scaled: jax.Array,
    uniform: jax.Array,
    floor: jax.Array,
    k: jax.Array,
    top_p: jax.Array,
    whole: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Draws from the vocabulary, in order of ids, what k, floor and top_p leave: ids, floors [R].

    Rows that are `whole` keep everything.
    """

    def search(_: None) -> jax.Array:
        cut = jnp.maximum(floor, _kth_largest(scaled, k))
        best = jnp.max(scaled, axis=-1, keepdims=True)
        kept = jnp.where(scaled >= cut[:, None], jnp.exp(scaled - best), 0.0)
        return jnp.maximum(cut, _nucleus_floor(scaled, kept, top_p))

    cut = lax.cond(jnp.all(whole), lambda _: floor, search, None)
    cut = jnp.where(whole, -jnp.inf, cut)
    return inverse_cdf_draw(jnp.where(scaled >= cut[:, None], scaled, -jnp.inf), uniform), cut


def _draw(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Inverse-CDF draw from unnormalised weights [R, C]: an index with weight > 0."""
    upto = ordered_cumsum(weights)
    index = jnp.sum(upto <= (uniform * upto[:, -1])[:, None], axis=-1)
    last = weights.shape[-1] - 1 - jnp.argmax((weights > 0)[:, ::-1], axis=-1)
    return jnp.minimum(index, last)


def _sortable(x: jax.Array) -> jax.Array:
    """Float32 as int32 of the same order."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _unsortable(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits), jnp.float32)


def _largest_cut(x: jax.Array, enough) -> jax.Array:
    """Per row, the largest value c of x's order for which `enough(x >= c)` holds, by bisection."""
    order = _sortable(x)
    low = jnp.full(x.shape[:1], -(2**31) + 1, jnp.int32)
    high = jnp.max(order, axis=-1)

    def halve(_, bounds):
        low, high = bounds
        # Rounded up without overflow: low | high minus half of their difference's bits.
        middle = (low | high) - ((low ^ high) >> 1)
        ok = enough(order >= middle[:, None])
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle - 1)

    low, _ = lax.fori_loop(0, 32, halve, (low, high))
    return _unsortable(low)


def _kth_largest(x: jax.Array, k: jax.Array) -> jax.Array:
    """Value of the k-th largest entry of each row; ties at it all stand at or above it."""
    return lax.cond(
        jnp.all(k >= x.shape[-1]),
        lambda _: jnp.full(x.shape[:1], -jnp.inf),
        lambda _: _largest_cut(x, lambda above: jnp.sum(above, axis=-1) >= k),
        None,
    )


def _nucleus_floor(x: jax.Array, kept: jax.Array, top_p: jax.Array) -> jax.Array:
    """Largest value whose entries at or above it reach top_p of the kept mass."""
    target = top_p * ordered_sum(kept)
    return _largest_cut(x, lambda above: ordered_sum(jnp.where(above, kept, 0.0)) >= target)
