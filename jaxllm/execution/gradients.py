"""The engine's forward arithmetic with gradients, so that a trainer computes what the engine does.

Forward passes call the same kernels, in the order of addition that they have there; backward passes
are plain JAX. Where a kernel is not used (no CPU, or several devices) both directions are plain.
"""

import functools
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.execution.ops import product, product_impl
from jaxllm.models.layers import Ops
from jaxllm.models.llama import Attend, causal_attention
from pallas_kernels.ordered import ordered_sum
from pallas_kernels.paged_attention import paged_attention, pool_dtype
from pallas_kernels.paged_attention.pool import to_storage

if TYPE_CHECKING:
    from jaxllm.execution.step import AttentionPlan


def differentiable_ops(platform: str, num_devices: int) -> Ops:
    """Ops with gradients whose forward results are those of `choose_ops`."""
    if platform != "cpu":
        return Ops()
    impl = product_impl(platform, num_devices)
    return Ops(functools.partial(_product, impl), jnp.float32, row_sum)


def causal_attend(platform: str, plan: "AttentionPlan", block_size: int) -> Attend:
    """Causal attention over whole sequences, as the engine's plan does it on one CPU device: with
    its kernel, on K and V rounded to its cache's dtype (the gradient passes the rounding by)."""
    if platform != "cpu" or plan.mesh.size > 1:
        return causal_attention
    return functools.partial(_causal, plan.impl, jnp.dtype(plan.kv_dtype), block_size)


def log_normalizer(logits: jax.Array) -> jax.Array:
    """Logarithm of the sum of exponentials over the last axis: [..., V] -> [...]."""
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    return top[..., 0] + jnp.log(row_sum(jnp.exp(logits - top)))


@jax.custom_vjp
def row_sum(x: jax.Array) -> jax.Array:
    """x [..., N] -> [...]: `ordered_sum` with a gradient."""
    return ordered_sum(x)


def _row_sum_forward(x: jax.Array) -> tuple[jax.Array, int]:
    return ordered_sum(x), x.shape[-1]


def _row_sum_backward(size: int, gradient: jax.Array) -> tuple[jax.Array]:
    return (jnp.broadcast_to(gradient[..., None], (*gradient.shape, size)),)


row_sum.defvjp(_row_sum_forward, _row_sum_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(impl: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    return product(impl, x, weight)


def _product_forward(
    impl: str, x: jax.Array, weight: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return product(impl, x, weight), (x, weight)


def _product_backward(
    impl: str, kept: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weight = kept
    gradient = gradient.astype(jnp.float32)
    of_x = jnp.einsum("...o,oi->...i", gradient, weight.astype(jnp.float32))
    of_weight = jnp.einsum("...o,...i->oi", gradient, x.astype(jnp.float32))
    return of_x.astype(x.dtype), of_weight.astype(weight.dtype)


_product.defvjp(_product_forward, _product_backward)


def _causal(
    impl: str,
    kv_dtype: np.dtype,
    block_size: int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: None = None,
    window: int | None = None,
) -> tuple[jax.Array, None]:
    """An `Attend` of models.llama without caches."""
    return _causal_rows(impl, kv_dtype, block_size, window, q, k, v), None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _causal_rows(
    impl: str,
    kv_dtype: np.dtype,
    block_size: int,
    window: int | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
) -> jax.Array:
    """q [..., S, H, D], k and v [..., S, K, D] -> [..., S, H, D]; each sequence has the blocks
    that a request would have."""
    length, heads, dim = q.shape[-3:]
    count = math.prod(q.shape[:-3])
    num_blocks = -(-length // block_size)

    def pool(x: jax.Array) -> jax.Array:
        rows = to_storage(x.astype(kv_dtype), pool_dtype(kv_dtype, "cpu"))
        rows = rows.reshape(count, length, -1, dim)
        rows = jnp.pad(rows, ((0, 0), (0, num_blocks * block_size - length), (0, 0), (0, 0)))
        return rows.reshape(count * num_blocks, block_size, -1, dim).swapaxes(1, 2)

    out: jax.Array = paged_attention(
        q.reshape(count * length, heads, dim),
        pool(k),
        pool(v),
        jnp.arange(count * num_blocks, dtype=jnp.int32).reshape(count, num_blocks),
        jnp.full(count, length, jnp.int32),
        jnp.arange(count + 1, dtype=jnp.int32) * length,
        scale=dim**-0.5,
        window=window,
        kv_dtype=kv_dtype,
        impl=impl,
    )
    return out.reshape(q.shape)


def _causal_forward(
    impl: str,
    kv_dtype: np.dtype,
    block_size: int,
    window: int | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return _causal_rows(impl, kv_dtype, block_size, window, q, k, v), (q, k, v)


def _causal_backward(
    impl: str,
    kv_dtype: np.dtype,
    block_size: int,
    window: int | None,
    kept: tuple[jax.Array, jax.Array, jax.Array],
    gradient: jax.Array,
) -> tuple[jax.Array, ...]:
    q, k, v = kept
    # The backward pass is at the rounded K and V, which the forward pass attended to.
    k, v = (x.astype(kv_dtype).astype(x.dtype) for x in (k, v))
    _, pull = jax.vjp(lambda q, k, v: causal_attention(q, k, v, None, window)[0], q, k, v)
    return tuple(pull(gradient))


_causal_rows.defvjp(_causal_forward, _causal_backward)
