"""Which arithmetic a model is built with on which platform."""

import functools

import jax
import jax.numpy as jnp

from jaxllm.models.layers import Ops
from pallas_kernels.linear import linear, select_impl


def choose_ops(platform: str, num_devices: int) -> Ops:
    """Ops for a platform ("cpu", "gpu", ...) and a mesh of this size.

    On a CPU activations stay in float32 between the products: narrow floats have no vector
    arithmetic there, and XLA would convert back and forth around every operation. The C++ product
    is opaque to XLA's partitioner, so a sharded model takes XLA's.
    """
    if platform != "cpu":
        return Ops()
    impl = "xla" if num_devices > 1 else select_impl()
    return Ops(linear=functools.partial(_linear, impl), activation_dtype=jnp.float32)


def differentiable_ops(platform: str) -> Ops:
    """Ops for training on a platform: those of `choose_ops`, without kernels that have no gradient.

    On a CPU products are float32 whatever the weights are, as the C++ product's sums.
    """
    if platform != "cpu":
        return Ops()
    return Ops(linear=_float32_linear, activation_dtype=jnp.float32)


def _float32_linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.einsum("...i,oi->...o", x, weight.astype(jnp.float32))


def _linear(impl: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., in] times weight [out, in] by the named implementation of `linear`."""
    flat = linear(x.reshape(-1, x.shape[-1]), weight, impl=impl)
    return flat.reshape(*x.shape[:-1], weight.shape[0])
