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


def plain_linear(x: jax.Array, weight: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    """x [..., in] times weight [out, in], accumulated in float32, in the dtype of x; scale [out]
    is what a step of an int8 weight counts in each row."""
    if scale is not None:
        weight = weight.astype(x.dtype)
    product = jax.lax.dot_general(
        x.astype(weight.dtype),
        weight,
        (((x.ndim - 1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    return (product if scale is None else product * scale).astype(x.dtype)


def plain_sum(x: jax.Array) -> jax.Array:
    """x [..., N] -> [...]: the sum of the last axis."""
    return jnp.sum(x, axis=-1)


def as_it_is(x: Any) -> Any:
    return x


def take_rows(x: jax.Array, rows: jax.Array | None) -> jax.Array:
    """x [T, ...] at rows int32 [N], zeros where a row is T or above: [N, ...]; None takes all."""
    return x if rows is None else jnp.take(x, rows, axis=0, mode="fill", fill_value=0)


def quantize_rows(weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """weight [out, in] as int8 and the float32 value of a step in each row [out]: symmetric, to
    nearest, the largest magnitude of a row at 127."""
    weight = weight.astype(jnp.float32)
    largest = jnp.max(jnp.abs(weight), axis=1)
    step = jnp.where(largest > 0, largest, 1.0) / 127
    return jnp.round(weight / step[:, None]).astype(jnp.int8), step


@dataclasses.dataclass(frozen=True, slots=True)
class Ops:
    """The arithmetic a model is built with.

    Attributes:
      linear: (x [..., in], weight [out, in]) -> [..., out] in the dtype of x; for int8 weights with
        the value of a step in each row, [out], behind them.
      activation_dtype: dtype between the layers; None takes that of the weights.
      row_sum: x [..., N] -> [...], the sum of the last axis.
      apart: applied to products before they are added to each other. A compiler that fuses one of
        them with the addition chooses which, and the last bits depend on it; a barrier leaves it
        none to fuse.
      int8_weights: keep matrices as int8 with a float32 `weight_scale` [out] beside them.
    """

    linear: Callable[..., jax.Array] = plain_linear
    activation_dtype: DTypeLike | None = None
    row_sum: Callable[[jax.Array], jax.Array] = plain_sum
    apart: Callable[[Any], Any] = as_it_is
    int8_weights: bool = False


class Matrix(nnx.Module):
    """A weight [out, in] and, where it is kept as int8, the value of a step in each row."""

    def __init__(
        self, shape: tuple[int, int], axes: tuple[str, str], ops: Ops, dtype: DTypeLike, key: Any
    ):
        weight = jax.random.normal(key, shape) * shape[1] ** -0.5
        scale = None
        if ops.int8_weights:
            weight, scale = quantize_rows(weight)
        else:
            weight = weight.astype(dtype)
        self.weight = nnx.Param(weight, logical_axes=axes)
        self.weight_scale = None if scale is None else nnx.Param(scale, logical_axes=axes[:1])
        self.ops = ops

    def multiply(self, x: jax.Array) -> jax.Array:
        """x [..., in] -> [..., out]."""
        if self.weight_scale is None:
            return self.ops.linear(x, self.weight[...])
        return self.ops.linear(x, self.weight[...], self.weight_scale[...])


class Embedding(Matrix):
    """Token embedding, weight [V, hidden]."""

    def __init__(
        self, vocab_size: int, hidden_size: int, ops: Ops, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        shape = (vocab_size, hidden_size)
        super().__init__(shape, ("vocab", "embed"), ops, dtype, rngs.params())
        self.dtype = dtype

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """token_ids int32 [...] -> [..., hidden]; V and above stand for no token: zeros."""
        rows = jnp.take(self.weight[...], token_ids, axis=0, mode="fill", fill_value=0)
        if self.weight_scale is None:
            return rows
        scale = jnp.take(self.weight_scale[...], token_ids, mode="fill", fill_value=0)
        return (rows * scale[..., None]).astype(self.dtype)


class Linear(Matrix):
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
        super().__init__((out_features, in_features), axes, ops, dtype, rngs.params())
        self.bias = (
            nnx.Param(jnp.zeros((out_features,), dtype), logical_axes=axes[:1]) if bias else None
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., in] -> [..., out]."""
        y = self.multiply(x)
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
