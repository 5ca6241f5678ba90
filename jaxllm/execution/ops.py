"""Which arithmetic a model is built with on which platform."""

import functools

import jax
import jax.numpy as jnp

from jaxllm.models.layers import Ops, as_it_is
from pallas_kernels.linear import linear, select_impl
from pallas_kernels.ordered import ordered_sum


def choose_ops(
    platform: str,
    num_devices: int,
    batch_invariant: bool = False,
    int8_weights: bool = False,
) -> Ops:
    """Ops for a platform ("cpu", "gpu", ...) and a mesh of this size.

    batch_invariant: leave the compiler no choice that depends on the number of tokens, where it
    would be one of bits.

    On a CPU activations stay in float32 between the products: narrow floats have no vector
    arithmetic there, and XLA would convert back and forth around every operation; and sums have an
    order that the number of tokens does not change.
    """
    apart = jax.lax.optimization_barrier if batch_invariant else as_it_is
    if platform != "cpu":
        return Ops(apart=apart, int8_weights=int8_weights)
    impl = product_impl(platform, num_devices)
    of_impl = functools.partial(product, impl)
    return Ops(of_impl, jnp.float32, ordered_sum, apart, int8_weights)


def product_impl(platform: str, num_devices: int) -> str:
    """Whose products a model uses: "ffi", the C++ kernel, or "xla".

    The C++ kernel is opaque to XLA's partitioner, so a sharded model takes XLA's.
    """
    return select_impl() if platform == "cpu" and num_devices == 1 else "xla"


def product(
    impl: str, x: jax.Array, weight: jax.Array, scale: jax.Array | None = None
) -> jax.Array:
    """x [..., in] times weight [out, in] by the named implementation of `linear`."""
    flat = linear(x.reshape(-1, x.shape[-1]), weight, scale=scale, impl=impl)
    return flat.reshape(*x.shape[:-1], weight.shape[0])
