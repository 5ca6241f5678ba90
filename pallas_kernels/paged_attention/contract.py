"""The contract of paged attention: what a call is, and what is wrong with it.

Legend used in every docstring of this package: T tokens in the step, R requests, H query heads, K
KV heads, G = H / K the group, D head_dim, B block size in tokens, P blocks in the pool, M blocks in
a row of a block table.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

# What a kernel for GPUs is made for; the plain path takes any.
HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (8, 16, 32, 64)
KV_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8")
QUERY_DTYPES = ("bfloat16", "float16", "float32")


class AttentionError(ValueError):
    """A call of paged attention that cannot be served; the message names the offending value."""


class ContractError(AttentionError):
    """Shapes, dtypes or options that contradict the contract, whatever the implementation."""


class UnsupportedError(AttentionError):
    """A valid call that the implementation named cannot do, or one that is not there."""


@dataclass(frozen=True, slots=True)
class Case:
    """The static facts of one call: all that an implementation may accept or refuse it by.

    `query_tokens` is T, `requests` R, `table_width` M; `kv_dtype` is the type of the numbers in the
    pool and `pool_dtype` the type the pool is stored in (they differ where a pool holds bits, see
    pool.py).
    """

    query_tokens: int
    requests: int
    query_heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    table_width: int
    query_dtype: str
    kv_dtype: str
    pool_dtype: str
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    k_scale: bool = False
    v_scale: bool = False
    return_lse: bool = False
    decode: bool = False

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query_heads // self.kv_heads

    @property
    def stored_as_bits(self) -> bool:
        return self.pool_dtype != self.kv_dtype


def resolve_kv_dtype(
    pool_dtype: jax.typing.DTypeLike, kv_dtype: jax.typing.DTypeLike | None
) -> np.dtype:
    """The type of the numbers in a pool stored as `pool_dtype`, or a ContractError."""
    stored = jnp.dtype(pool_dtype)
    if kv_dtype is None:
        if stored.kind == "u":
            raise ContractError(f"a {stored.name} pool holds bits: say which numbers by kv_dtype")
        kv_dtype = stored
    numbers = jnp.dtype(kv_dtype)
    if numbers.name not in KV_DTYPES:
        raise ContractError(f"kv_dtype {numbers.name} is not one of {', '.join(KV_DTYPES)}")
    if stored != numbers and not (stored.kind == "u" and stored.itemsize == numbers.itemsize):
        raise ContractError(f"a {stored.name} pool cannot hold {numbers.name}")
    return numbers


def check_call(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_starts: jax.Array,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    k_scale: jax.Array | float | None,
    v_scale: jax.Array | float | None,
    return_lse: bool,
    decode: bool,
    kv_dtype: jax.typing.DTypeLike | None,
) -> Case:
    """Check shapes, dtypes and options, and return the static facts, or raise ContractError."""
    if q.ndim != 3 or k_pool.ndim != 4:
        raise ContractError(
            f"q must be [T, H, D] and the pools [P, K, B, D]: got {q.shape}, {k_pool.shape}"
        )
    T, H, D = q.shape
    _, K, B, pool_dim = k_pool.shape
    if v_pool.shape != k_pool.shape or v_pool.dtype != k_pool.dtype:
        raise ContractError(
            f"K and V pools differ: {k_pool.shape} {k_pool.dtype}, {v_pool.shape} {v_pool.dtype}"
        )
    if pool_dim != D:
        raise ContractError(f"head_dim of q is {D} but that of the pools {pool_dim}")
    if H % K:
        raise ContractError(f"{H} query heads cannot share {K} KV heads evenly")
    if q.dtype.name not in QUERY_DTYPES:
        raise ContractError(f"query dtype {q.dtype.name} is not one of {', '.join(QUERY_DTYPES)}")
    if block_tables.ndim != 2:
        raise ContractError(f"block_tables must be [R, M]: got {block_tables.shape}")
    R, M = block_tables.shape
    if context_lens.shape != (R,) or query_starts.shape != (R + 1,):
        raise ContractError(
            f"for R = {R}: context_lens {context_lens.shape}, query_starts {query_starts.shape}"
        )
    for name, array in (
        ("block_tables", block_tables),
        ("context_lens", context_lens),
        ("query_starts", query_starts),
    ):
        if array.dtype != jnp.int32:
            raise ContractError(f"{name} must be int32: got {array.dtype}")
    if decode and T != R:
        raise ContractError(f"decode promises one token per request, but T = {T} and R = {R}")
    if not scale > 0:
        raise ContractError(f"scale must be positive: got {scale}")
    if window is not None and window < 1:
        raise ContractError(f"window must be at least 1: got {window}")
    if soft_cap is not None and not soft_cap > 0:
        raise ContractError(f"soft_cap must be positive: got {soft_cap}")
    if sinks is not None and sinks.shape != (H,):
        raise ContractError(f"sinks must be [H] = [{H}]: got {sinks.shape}")
    for name, factor in (("k_scale", k_scale), ("v_scale", v_scale)):
        if factor is not None and jnp.shape(factor) not in ((), (K,)):
            raise ContractError(f"{name} must be a scalar or [K] = [{K}]: got {jnp.shape(factor)}")
    return Case(
        query_tokens=T,
        requests=R,
        query_heads=H,
        kv_heads=K,
        head_dim=D,
        block_size=B,
        table_width=M,
        query_dtype=q.dtype.name,
        kv_dtype=resolve_kv_dtype(k_pool.dtype, kv_dtype).name,
        pool_dtype=k_pool.dtype.name,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks is not None,
        k_scale=k_scale is not None,
        v_scale=v_scale is not None,
        return_lse=return_lse,
        decode=decode,
    )
