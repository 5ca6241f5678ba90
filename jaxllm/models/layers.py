"""Building blocks of the decoders: weights in the checkpoint's layout, annotated by axis.

Every parameter names the logical axes of its array; `jaxllm.execution.mesh` maps those to mesh
axes. Names of modules and parameters are those of the Hugging Face checkpoints, so that the
path of a parameter is its name in a file.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike


def plain_linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., in] times weight [out, in], accumulated in float32, in the dtype of x."""
    product = jax.lax.dot_general(
        x.astype(weight.dtype),
        weight,
        (((x.ndim - 1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    return product.astype(x.dtype)


def plain_sum(x: jax.Array) -> jax.Array:
    """x [..., N] -> [...]: the sum of the last axis."""
    return jnp.sum(x, axis=-1)


def as_it_is(x: Any) -> Any:
    return x


@dataclasses.dataclass(frozen=True, slots=True)
class Ops:
    """The arithmetic a model is built with.

    Attributes:
      linear: (x [..., in], weight [out, in]) -> [..., out] in the dtype of x.
      activation_dtype: dtype between the layers; None takes that of the weights.
      row_sum: x [..., N] -> [...], the sum of the last axis.
      apart: applied to products before they are added to each other. A compiler that fuses one of
        them with the addition chooses which, and the last bits depend on it; a barrier leaves it
        none to fuse.
    """

    linear: Callable[[jax.Array, jax.Array], jax.Array] = plain_linear
    activation_dtype: DTypeLike | None = None
    row_sum: Callable[[jax.Array], jax.Array] = plain_sum
    apart: Callable[[Any], Any] = as_it_is


class Embedding(nnx.Module):
    """Token embedding, weight [V, hidden]."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: DTypeLike, rngs: nnx.Rngs):
        weight = jax.random.normal(rngs.params(), (vocab_size, hidden_size)) * hidden_size**-0.5
        self.weight = nnx.Param(weight.astype(dtype), logical_axes=("vocab", "embed"))

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """token_ids int32 [...] -> [..., hidden]."""
        return jnp.take(self.weight[...], token_ids, axis=0)


class Linear(nnx.Module):
    """Affine map with weight [out, in] and an optional bias [out]."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axes: tuple[str, str],
        ops: Ops,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        bias: bool = False,
    ):
        weight = jax.random.normal(rngs.params(), (out_features, in_features)) * in_features**-0.5
        self.weight = nnx.Param(weight.astype(dtype), logical_axes=axes)
        self.bias = (
            nnx.Param(jnp.zeros((out_features,), dtype), logical_axes=axes[:1]) if bias else None
        )
        self.ops = ops

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., in] -> [..., out]."""
        y = self.ops.linear(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)


class RMSNorm(nnx.Module):
    """Root mean square normalisation (arXiv 1910.07467) over the last axis, in float32."""

    def __init__(self, size: int, eps: float, ops: Ops, dtype: DTypeLike, axis: str = "embed"):
        self.weight = nnx.Param(jnp.ones((size,), dtype), logical_axes=(axis,))
        self.eps = eps
        self.ops = ops

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., size] -> the same shape and dtype."""
        y = x.astype(jnp.float32)
        mean = self.ops.row_sum(self.ops.apart(y * y))[..., None] / y.shape[-1]
        y = y * jax.lax.rsqrt(mean + self.eps)
        return (y * self.weight[...].astype(jnp.float32)).astype(x.dtype)
