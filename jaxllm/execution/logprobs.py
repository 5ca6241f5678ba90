"""Log probabilities of sampled tokens and of the most probable ones."""

import jax
import jax.numpy as jnp

from pallas_kernels.ordered import ordered_sum
from pallas_kernels.sampling import two_stage_top_k

# JSON has no minus infinity; a token that cannot occur gets this instead.
LEAST_LOGPROB = -9999.0


def token_logprobs(
    num_top: int, logits: jax.Array, token_ids: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """For logits float32 [R, V] and token ids int32 [R]: the token's log probability and rank
    (1 is the most probable) [R], and values and ids of the num_top most probable tokens
    [R, num_top].

    Values are log softmax, raised to -9999 where they are below.
    """
    normalizer = _log_normalizer(logits)
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=-1)
    rank = jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32) + 1
    values, ids = two_stage_top_k(logits, num_top)
    return _finite(chosen - normalizer)[:, 0], rank, _finite(values - normalizer), ids


def all_logprobs(logits: jax.Array) -> jax.Array:
    """Log softmax float32 [R, V] of logits [R, V], raised to -9999 where it is below."""
    return _finite(logits - _log_normalizer(logits))


def processed_logits(logits: jax.Array, temperature: jax.Array, floor: jax.Array) -> jax.Array:
    """The logits that were sampled from: divided by the temperature [R] (0: not at all), without
    what lies below the row's floor [R]."""
    scaled = logits / jnp.where(temperature == 0.0, 1.0, temperature)[:, None]
    return jnp.where(scaled >= floor[:, None], scaled, -jnp.inf)


def _log_normalizer(logits: jax.Array) -> jax.Array:
    """Logarithm of the sum of exponentials of each row of logits [R, V]: [R, 1]."""
    top = jnp.max(logits, axis=-1, keepdims=True)
    return top + jnp.log(ordered_sum(jnp.exp(logits - top)))[:, None]


def _finite(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, LEAST_LOGPROB)
