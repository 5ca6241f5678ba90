"""Which arithmetic a model is built with on which platform."""

import functools

import jax
import jax.numpy as jnp

from jaxllm.models.layers import Ops
from pallas_kernels.linear import linear, select_impl
from pallas_kernels.ordered import ordered_sum


def choose_ops(platform: str, num_devices: int) -> Ops:
    """Ops for a platform ("cpu", "gpu", ...) and a mesh of this size.

    On a CPU activations stay in float32 between the products: narrow floats have no vector
    arithmetic there, and XLA would convert back and forth around every operation; and sums have an
    order that the number of tokens does not change.
    """
    if platform != "cpu":
        return Ops()
    impl = product_impl(platform, num_devices)
    return Ops(functools.partial(_linear, impl), jnp.float32, ordered_sum)


def product_impl(platform: str, num_devices: int) -> str:
    """Whose products a model uses: "ffi", the C++ kernel, or "xla".

    The C++ kernel is opaque to XLA's partitioner, so a sharded model takes XLA's.
    """
    return select_impl() if platform == "cpu" and num_devices == 1 else "xla"


def differentiable_ops(platform: str, num_devices: int) -> Ops:
    """Ops with gradients for training, whose forward products are those of `choose_ops`."""
    if platform != "cpu":
        return Ops()
    impl = "xla" if num_devices > 1 else select_impl()
    return Ops(linear=functools.partial(_linear_with_gradient, impl), activation_dtype=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear_with_gradient(impl: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    return _linear(impl, x, weight)


def _linear_forward(
    impl: str, x: jax.Array, weight: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _linear(impl, x, weight), (x, weight)


def _linear_backward(
    impl: str, kept: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weight = kept
    gradient = gradient.astype(jnp.float32)
    of_x = jnp.einsum("...o,oi->...i", gradient, weight.astype(jnp.float32))
    of_weight = jnp.einsum("...o,...i->oi", gradient, x.astype(jnp.float32))
    return of_x.astype(x.dtype), of_weight.astype(weight.dtype)


_linear_with_gradient.defvjp(_linear_forward, _linear_backward)


def _linear(impl: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., in] times weight [out, in] by the named implementation of `linear`."""
    flat = linear(x.reshape(-1, x.shape[-1]), weight, impl=impl)
    return flat.reshape(*x.shape[:-1], weight.shape[0])
