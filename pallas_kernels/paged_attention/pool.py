"""The KV pool: its layout, its storage type, and the in-place write.

The layout is known only here and in the kernels.

K and V are apart, each `[P, K, B, D]`: the B x D tile of one head in one block is one contiguous
run, which is one copy for a GPU's tensor memory accelerator and one stream for a CPU. The head axis
is the one that is sharded.

On a CPU a pool of narrow floats is stored as its bits (bf16 and f16 as uint16, fp8 as uint8):
XLA:CPU widens a float scatter or gather to f32 and back over the whole pool, hundreds of times
slower than moving the bits. Such a pool is passed with the static `kv_dtype`, the type of the
numbers in it.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from pallas_kernels import cpu_library
from pallas_kernels.paged_attention.contract import ContractError, resolve_kv_dtype

type Scale = jax.Array | float | None


def pool_shape(
    num_blocks: int, kv_heads: int, block_size: int, head_dim: int
) -> tuple[int, int, int, int]:
    """The shape [P, K, B, D] of one pool."""
    return (num_blocks, kv_heads, block_size, head_dim)


def pool_spec(axis: str = "tensor") -> PartitionSpec:
    """How a pool is sharded: its KV heads over the mesh axis `axis`."""
    return PartitionSpec(None, axis, None, None)


def pool_dtype(kv_dtype: jax.typing.DTypeLike, platform: str) -> np.dtype:
    """The type a pool of `kv_dtype` numbers is stored in on `platform` ("cpu", "gpu", ...)."""
    numbers = resolve_kv_dtype(kv_dtype, None)
    if platform != "cpu" or numbers.itemsize == 4 or numbers.kind == "i":
        return numbers
    return jnp.dtype(f"uint{8 * numbers.itemsize}")


def allocate_pool(
    num_blocks: int,
    kv_heads: int,
    block_size: int,
    head_dim: int,
    kv_dtype: jax.typing.DTypeLike,
    *,
    platform: str | None = None,
    sharding: jax.sharding.Sharding | None = None,
) -> tuple[jax.Array, jax.Array]:
    """A zeroed K pool and V pool, [P, K, B, D] each.

    Stored as `platform` wants it (default: the default backend). On a single CPU device the memory
    is asked to consist of huge pages, where the library of CPU kernels loads.
    """
    platform = platform or jax.default_backend()
    stored = pool_dtype(kv_dtype, platform)
    shape = pool_shape(num_blocks, kv_heads, block_size, head_dim)
    alone = sharding is None or len(sharding.device_set) == 1
    if platform == "cpu" and alone and cpu_library.unavailable() is None:
        zeros = _zeros_in_huge_pages(shape, stored, sharding)
        return zeros(), zeros()
    return jnp.zeros(shape, stored, device=sharding), jnp.zeros(shape, stored, device=sharding)


@functools.cache
def _zeros_in_huge_pages(
    shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding | None
) -> Callable[[], jax.Array]:
    call = jax.ffi.ffi_call(cpu_library.ZEROS, jax.ShapeDtypeStruct(shape, dtype))
    return jax.jit(lambda: call(), out_shardings=sharding)


def quantize(x: jax.Array, kv_dtype: np.dtype, scale: Scale) -> jax.Array:
    """Rows x [T, K, D] as numbers of `kv_dtype`: x / scale, rounded to nearest.

    Saturating for int8 and fp8.
    """
    if scale is not None:
        per_head = jnp.broadcast_to(jnp.asarray(scale, jnp.float32), (x.shape[1],))
        x = x.astype(jnp.float32) / per_head[:, None]
    if kv_dtype == jnp.int8:
        return jnp.clip(jnp.rint(x.astype(jnp.float32)), -128, 127).astype(jnp.int8)
    if kv_dtype.itemsize == 1:
        limit = float(jnp.finfo(kv_dtype).max)
        return jnp.clip(x.astype(jnp.float32), -limit, limit).astype(kv_dtype)
    return x.astype(kv_dtype)


def to_storage(x: jax.Array, stored: np.dtype) -> jax.Array:
    """Numbers as the pool stores them: unchanged, or their bits."""
    return x if x.dtype == stored else lax.bitcast_convert_type(x, stored)


def widen(stored: jax.Array, kv_dtype: np.dtype) -> jax.Array:
    """What a pool stores, as f32 numbers."""
    if stored.dtype == jnp.uint16 and kv_dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(stored.astype(jnp.uint32) << 16, jnp.float32)
    if stored.dtype != kv_dtype:
        stored = lax.bitcast_convert_type(stored, kv_dtype)
    return stored.astype(jnp.float32)


def write_kv(
    k: jax.Array,
    v: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    slots: jax.Array,
    *,
    k_scale: Scale = None,
    v_scale: Scale = None,
    kv_dtype: jax.typing.DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Write the step's K and V rows into the pools; in place where the pools are donated.

    k, v: [T, K, D]; k_pool, v_pool: [P, K, B, D]; slots: i32[T], block * B + offset. Padding tokens
    carry slot 0, which lies in the null block that no request is ever given; a slot outside the
    pool is dropped. A scale (a scalar or [K]) divides on the way in and multiplies on the way out.
    Returns the new (k_pool, v_pool).
    """
    _, K, B, D = k_pool.shape
    for name, rows in (("k", k), ("v", v)):
        if rows.shape != (slots.shape[0], K, D):
            raise ContractError(
                f"{name} must be [T, K, D] = {(slots.shape[0], K, D)}: got {rows.shape}"
            )
    numbers = resolve_kv_dtype(k_pool.dtype, kv_dtype)
    # A negative slot would count from the end of the pool.
    block = jnp.where(slots < 0, k_pool.shape[0], slots // B)
    offset = slots % B

    def write(rows: jax.Array, pool: jax.Array, scale: Scale) -> jax.Array:
        stored = to_storage(quantize(rows, numbers, scale), pool.dtype)
        return pool.at[block, :, offset].set(stored, mode="drop")

    return write(k, k_pool, k_scale), write(v, v_pool, v_scale)
