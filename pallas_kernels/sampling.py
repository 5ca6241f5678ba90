"""Choosing tokens from logits [R, V] in two stages: groups of the vocabulary first, then within.

XLA:CPU's argmax, sort and running sums over a whole vocabulary cost more than the model's last
product (measured in docs/cpu_kernels.md). Reducing groups of neighbouring entries vectorises, and
leaves little to search. The functions are plain JAX, right on every platform, for any V.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ordered import ordered_cumsum, ordered_sum

# The reduction over a group is one pass of vectors; the search after it has V / 128 entries.
_GROUP = 128
_TOP_K_GROUP = 64


def two_stage_argmax(logits: jax.Array) -> jax.Array:
    """i32[R], the place of the largest of logits [R, V] in each row: of equal ones the first, as
    jnp.argmax for rows without NaN.
    """
    best = jnp.argmax(_reduce_groups(logits, _GROUP, _max), axis=-1)[:, None]
    columns, values = _take_groups(logits, best, _GROUP)
    return _at(columns, jnp.argmax(values, axis=-1))


def two_stage_top_k(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of logits [R, V] in falling order: values [R, k] and places i32[R, k]. Equal
    values come in the order of their places: the same as lax.top_k, for rows without NaN.

    Only the k groups with the largest maxima can hold them: anything in another group has k entries
    before it, one from each of these.
    """
    groups = -(-logits.shape[1] // _TOP_K_GROUP)
    if 2 * k > groups:  # too few groups to leave any out
        return _plain_top_k(logits, k)
    maxima = _reduce_groups(logits, _TOP_K_GROUP, _max)
    chosen = jnp.sort(lax.top_k(maxima, k)[1], axis=-1)  # by place, so that ties keep their order
    columns, values = _take_groups(logits, chosen, _TOP_K_GROUP)
    best, places = lax.top_k(values, k)
    return best, jnp.take_along_axis(columns, places, axis=-1)


def inverse_cdf_draw(logits: jax.Array, uniform: jax.Array) -> jax.Array:
    """i32[R]: in each row of logits [R, V] the first place where the running sum of
    softmax(logits) exceeds uniform [R] in [0, 1): one draw from softmax(logits) for one uniform.

    A logit of minus infinity is never drawn; a row of nothing else gives 0. Sums are f32.
    """
    logits = logits.astype(jnp.float32)
    top = _reduce_groups(logits, _GROUP, _max).max(axis=-1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    mass = _reduce_groups(jnp.exp(logits - top), _GROUP, ordered_sum)
    running = ordered_cumsum(mass)
    target = uniform.astype(jnp.float32)[:, None] * running[:, -1:]
    group = _first_beyond(running, mass, target)[:, None]
    before = jnp.where(
        group > 0, jnp.take_along_axis(running, jnp.maximum(group - 1, 0), axis=-1), 0.0
    )
    columns, values = _take_groups(logits, group, _GROUP)
    weights = jnp.exp(values - top)
    return _at(columns, _first_beyond(ordered_cumsum(weights), weights, target - before))


def _plain_top_k(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    values, places = lax.top_k(logits, k)
    return values, places.astype(jnp.int32)


def _max(x: jax.Array) -> jax.Array:
    return x.max(axis=-1)


def _reduce_groups(x: jax.Array, size: int, reduce: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Reduce each run of `size` columns of x [R, V] by a reduction of the last axis:
    [R, ceil(V / size)].
    """
    rows, width = x.shape
    whole = width // size
    parts = []
    if whole:
        parts.append(reduce(x[:, : whole * size].reshape(rows, whole, size)))
    if whole * size < width:
        parts.append(reduce(x[:, whole * size :])[:, None])
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def _take_groups(x: jax.Array, groups: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Columns of the groups [R, n] of x [R, V], in their order: places i32[R, n * size] and values;
    minus infinity past the end of x.
    """
    columns = groups[:, :, None].astype(jnp.int32) * size + jnp.arange(size, dtype=jnp.int32)
    columns = columns.reshape(x.shape[0], -1)
    inside = columns < x.shape[1]
    values = jnp.take_along_axis(x, jnp.where(inside, columns, 0), axis=-1)
    return columns, jnp.where(inside, values, -jnp.inf)


def _at(columns: jax.Array, place: jax.Array) -> jax.Array:
    return jnp.take_along_axis(columns, place[:, None], axis=-1)[:, 0]


def _first_beyond(running: jax.Array, mass: jax.Array, target: jax.Array) -> jax.Array:
    """i32[R]: the first entry with some mass whose running sum [R, n] exceeds target [R, 1].

    Where rounding leaves none, the last one with mass. Mass is looked at because a running sum that
    is added up in a tree can rise, or fall, by a rounding at an entry of none.
    """
    places = jnp.arange(mass.shape[1], dtype=jnp.int32)
    some = mass > 0
    first = jnp.where(some & (running > target), places, mass.shape[1]).min(axis=-1)
    last = jnp.where(some, places, 0).max(axis=-1)
    return jnp.minimum(first, last)
