"""Paged attention on CPUs: the C++ kernels of csrc/, called through XLA's FFI.

Cache write and attention are one call, the pools aliased to its results, so a donated pool is
updated where it lies. The bits of an output row depend on its own query and context alone: not on
the batch, the chunking, or the number of threads. Ids that point outside the pool are an error of
the call (INVALID_ARGUMENT, raised when its result is read), never an access out of bounds.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import cpu_library
from pallas_kernels.paged_attention.contract import Case
from pallas_kernels.paged_attention.pool import Scale

MAX_HEAD_DIM = 512

# The codes of csrc/kernels.h.
_DTYPE_CODES = {
    "float32": 0,
    "bfloat16": 1,
    "float16": 2,
    "float8_e4m3fn": 3,
    "float8_e5m2": 4,
    "int8": 5,
}


def unavailable() -> str | None:
    """Why the kernels cannot run in this process, or None."""
    return cpu_library.unavailable()


def refusal(case: Case) -> str | None:
    """Why the kernels cannot do `case`, or None."""
    if case.head_dim % 16 or case.head_dim > MAX_HEAD_DIM:
        return f"head_dim {case.head_dim} is not a multiple of 16 up to {MAX_HEAD_DIM}"
    return None


def attend(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_starts: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    return_lse: bool = False,
    decode: bool = False,
    kv_dtype: np.dtype,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """paged_attention of api.py by the C++ kernels: out [T, H, D], or (out, lse [T, H])."""
    del decode  # the kernels look at query_starts
    cpu_library.load()
    call = jax.ffi.ffi_call(cpu_library.ATTENTION, _row_results(q, return_lse))
    out, lse = call(
        q,
        k_pool,
        v_pool,
        block_tables,
        context_lens,
        query_starts,
        *_optional_operands(k_pool.shape[1], sinks, k_scale, v_scale),
        **_attributes(scale, window, soft_cap, sinks, k_scale, v_scale, return_lse, kv_dtype),
    )
    return (out, lse) if return_lse else out


def attend_and_write(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_starts: jax.Array,
    slots: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    return_lse: bool = False,
    decode: bool = False,
    kv_dtype: np.dtype,
) -> tuple[jax.Array | tuple[jax.Array, jax.Array], jax.Array, jax.Array]:
    """attend_and_write of api.py in one call: (out or (out, lse), k_pool, v_pool).

    Tokens whose slot lies in the null block are not written. Pools that are not donated are copied
    first, whole.
    """
    del decode
    cpu_library.load()
    out_type, lse_type = _row_results(q, return_lse)
    pools = [jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in (k_pool, v_pool)]
    call = jax.ffi.ffi_call(
        cpu_library.WRITE_AND_ATTEND,
        (out_type, *pools, lse_type),
        input_output_aliases={3: 1, 4: 2},
    )
    out, k_pool, v_pool, lse = call(
        q,
        k,
        v,
        k_pool,
        v_pool,
        block_tables,
        context_lens,
        query_starts,
        slots,
        *_optional_operands(k_pool.shape[1], sinks, k_scale, v_scale),
        **_attributes(scale, window, soft_cap, sinks, k_scale, v_scale, return_lse, kv_dtype),
    )
    return ((out, lse) if return_lse else out), k_pool, v_pool


def _row_results(
    q: jax.Array, return_lse: bool
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    lse_shape = q.shape[:2] if return_lse else (0,)
    return (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct(lse_shape, jnp.float32),
    )


def _optional_operands(
    kv_heads: int, sinks: jax.Array | None, k_scale: Scale, v_scale: Scale
) -> list[jax.Array]:
    """Sinks [H] and the scales [K] as f32; empty where there are none."""
    none = jnp.zeros((0,), jnp.float32)
    scales = [
        none if scale is None else jnp.broadcast_to(jnp.asarray(scale, jnp.float32), (kv_heads,))
        for scale in (k_scale, v_scale)
    ]
    return [none if sinks is None else sinks.astype(jnp.float32), *scales]


def _attributes(
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    k_scale: Scale,
    v_scale: Scale,
    return_lse: bool,
    kv_dtype: np.dtype,
) -> dict[str, np.float32 | np.int32]:
    """The options of handlers.cc."""
    return {
        "scale": np.float32(scale),
        "soft_cap": np.float32(soft_cap or 0),
        "window": np.int32(window or 0),
        "kv_dtype": np.int32(_DTYPE_CODES[jnp.dtype(kv_dtype).name]),
        "has_sinks": np.int32(sinks is not None),
        "has_k_scale": np.int32(k_scale is not None),
        "has_v_scale": np.int32(v_scale is not None),
        "return_lse": np.int32(return_lse),
        "isa": np.int32(cpu_library.isa_level()),
    }
