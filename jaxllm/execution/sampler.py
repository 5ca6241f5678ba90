"""The sampler: from logits [R, V] to token ids [R], one program per need.

A draw uses one uniform number, which depends on the request's seed and the position of the token
alone (jaxllm.execution.noise).
The order of operations is temperature, min-p, top-k, top-p.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.execution.batch import GREEDY, RANDOM, SamplingFields
from pallas_kernels.sampling import (
    inverse_cdf_draw,
    two_stage_argmax,
    two_stage_top_k,
)

# Candidates that truncated sampling looks at first; rows whose kept set may be larger take the
# path over the whole vocabulary.
NUM_CANDIDATES = 256


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
            scaled, uniform, fields.top_k, _floats(fields.top_p), _floats(fields.min_p)
        )
    return jnp.where(is_greedy, greedy_ids, ids), jnp.where(is_greedy, -jnp.inf, floor)


def _floats(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _sample_truncated(
    scaled: jax.Array, uniform: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draws from what min-p, top-k and top-p leave of softmax(scaled): ids and floors [R].

    A row whose kept set lies inside its most probable candidates is drawn from those, in falling
    order; another, and one without truncation, is drawn from the vocabulary, in order of ids. Which
    of the two depends on the row alone.
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
    kept_mass = jnp.sum(jnp.where(scaled >= floor[:, None], weights, 0.0), axis=-1)
    candidate_weights = jnp.where(values >= floor[:, None], jnp.exp(values - best), 0.0)
    upto = jnp.cumsum(candidate_weights, axis=-1)
    target = top_p * kept_mass
    all_inside = (floor > values[:, -1]) | (num_candidates == size)
    inside = (all_inside | (upto[:, -1] >= target)) & ~outside_k

    nucleus = jnp.where(upto - candidate_weights < target[:, None], candidate_weights, 0.0)
    drawn = _draw(nucleus, uniform)
    from_candidates = jnp.take_along_axis(ids, drawn[:, None], axis=1)[:, 0]
    least = jnp.min(jnp.where(nucleus > 0, values, jnp.inf), axis=-1)

    def cut_of_all(_: None) -> jax.Array:
        k = jnp.where(outside_k, top_k, size)
        cut = jnp.maximum(floor, _kth_largest(scaled, k))
        kept = jnp.where(scaled >= cut[:, None], weights, 0.0)
        return jnp.maximum(cut, _nucleus_floor(scaled, kept, top_p))

    def draw_from_all(cut: jax.Array) -> jax.Array:
        return inverse_cdf_draw(jnp.where(scaled >= cut[:, None], scaled, -jnp.inf), uniform)

    # A row without truncation is drawn as in a batch without truncation.
    whole = (top_k == 0) & (top_p >= 1.0) & (min_p == 0.0)
    inside = inside & ~whole
    nothing_cut = jnp.full_like(least, -jnp.inf)
    cut = lax.cond(jnp.all(inside | whole), lambda _: nothing_cut, cut_of_all, None)
    cut = jnp.where(whole, -jnp.inf, cut)
    from_all = lax.cond(
        jnp.all(inside), lambda _: jnp.zeros_like(from_candidates), draw_from_all, cut
    )
    return jnp.where(inside, from_candidates, from_all), jnp.where(inside, least, cut)


def _draw(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Inverse-CDF draw from unnormalised weights [R, C]: an index with weight > 0."""
    upto = jnp.cumsum(weights, axis=-1)
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
    return _largest_cut(x, lambda above: jnp.sum(above, axis=-1) >= k)


def _nucleus_floor(x: jax.Array, kept: jax.Array, top_p: jax.Array) -> jax.Array:
    """Largest value whose entries at or above it reach top_p of the kept mass."""
    target = top_p * jnp.sum(kept, axis=-1)
    return _largest_cut(x, lambda above: jnp.sum(jnp.where(above, kept, 0.0), axis=-1) >= target)
