"""Ragged paged attention: one contract, several implementations, one oracle."""

from pallas_kernels.paged_attention.api import attend_and_write, paged_attention
from pallas_kernels.paged_attention.contract import (
    AttentionError,
    Case,
    ContractError,
    UnsupportedError,
)
from pallas_kernels.paged_attention.pool import (
    allocate_pool,
    pool_dtype,
    pool_shape,
    pool_spec,
    write_kv,
)
from pallas_kernels.paged_attention.registry import (
    available_implementations,
    register_implementation,
    select_impl,
)

__all__ = [
    "AttentionError",
    "Case",
    "ContractError",
    "UnsupportedError",
    "allocate_pool",
    "attend_and_write",
    "available_implementations",
    "paged_attention",
    "pool_dtype",
    "pool_shape",
    "pool_spec",
    "register_implementation",
    "select_impl",
    "write_kv",
]
