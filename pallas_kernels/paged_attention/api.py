"""Ragged paged attention: the functions an engine calls.

Words: T tokens in the step, R requests, H query heads, K KV heads, D head_dim, P blocks in the
pool, B block size in tokens, M blocks per table row.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.contract import ContractError, check_call
from pallas_kernels.paged_attention.pool import Scale, write_kv
from pallas_kernels.paged_attention.registry import Implementation, get_implementation, select_impl


def paged_attention(
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
    kv_dtype: jax.typing.DTypeLike | None = None,
    impl: str = "auto",
) -> Any:
    """Causal attention of a ragged batch over the paged KV pool: out [T, H, D], or (out, lse).

    q: [T, H, D] in bf16, f16 or f32; k_pool, v_pool: [P, K, B, D]; block_tables: i32[R, M];
    context_lens: i32[R]; query_starts: i32[R + 1], not falling.

    Rows query_starts[r] .. query_starts[r + 1] - 1 of q are request r's query tokens: the last ones
    of its context of context_lens[r] tokens, whose K and V are in the pool already, those of the
    query tokens included. Token p of the context lies in block block_tables[r, p // B] at offset p
    % B. Rows from query_starts[R] on are padding: their output is zero. A padding request has
    context 0 and no query rows.

    scale multiplies the logits (units: one over the root of D, usually). window w: a query at
    position p sees keys p - w + 1 .. p. soft_cap c: logits become c * tanh(logits / c). sinks
    f32[H]: a logit per head that joins the softmax's denominator and nothing else
    (arXiv:2309.17453). k_scale, v_scale: a scalar or f32[K]; the numbers in the pool times the
    scale are K and V. lse is the logarithm of the denominator, sinks included; minus infinity for
    padding. decode: a promise that T == R and that each request has at most one query token
    (query_starts[r] == min(r, n) for n live requests, which come first). kv_dtype: the type of the
    numbers in a pool that is stored as bits (pool.py).

    impl: "auto", or a name of registry.py. ContractError for arguments that contradict this;
    UnsupportedError where the named implementation cannot do the case.
    """
    name, options = _prepare(
        q, k_pool, v_pool, block_tables, context_lens, query_starts, impl,
        scale=scale, window=window, soft_cap=soft_cap, sinks=sinks,
        k_scale=k_scale, v_scale=v_scale, return_lse=return_lse, decode=decode, kv_dtype=kv_dtype,
    )  # fmt: skip
    attend = get_implementation(name).attend
    return attend(q, k_pool, v_pool, block_tables, context_lens, query_starts, **options)


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
    kv_dtype: jax.typing.DTypeLike | None = None,
    impl: str = "auto",
) -> tuple[Any, jax.Array, jax.Array]:
    """Write the step's k and v [T, K, D] at slots i32[T], then attend.

    Returns (out, k_pool, v_pool), or ((out, lse), k_pool, v_pool). Arguments as in
    `paged_attention` and `write_kv`. Implementations with a fused call do both at once; the others
    are composed of the two.
    """
    if (
        k.shape != (q.shape[0], *k_pool.shape[1::2])
        or v.shape != k.shape
        or slots.shape != k.shape[:1]
    ):
        raise ContractError(
            f"k and v must be [T, K, D] and slots [T]: got {k.shape}, {v.shape}, {slots.shape}"
        )
    name, options = _prepare(
        q, k_pool, v_pool, block_tables, context_lens, query_starts, impl,
        scale=scale, window=window, soft_cap=soft_cap, sinks=sinks,
        k_scale=k_scale, v_scale=v_scale, return_lse=return_lse, decode=decode, kv_dtype=kv_dtype,
    )  # fmt: skip
    implementation = get_implementation(name)
    run = implementation.attend_and_write or _composed(implementation)
    return run(q, k, v, k_pool, v_pool, block_tables, context_lens, query_starts, slots, **options)


def _prepare(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_starts: jax.Array,
    impl: str,
    **options: Any,
) -> tuple[str, dict[str, Any]]:
    """Check the call and choose: the implementation's name, the options with kv_dtype resolved."""
    case = check_call(q, k_pool, v_pool, block_tables, context_lens, query_starts, **options)
    return select_impl(impl, case=case), options | {"kv_dtype": jnp.dtype(case.kv_dtype)}


def _composed(implementation: Implementation) -> Callable[..., Any]:
    """Write, then attend, for an implementation without a fused call."""

    def run(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        k_pool: jax.Array,
        v_pool: jax.Array,
        block_tables: jax.Array,
        context_lens: jax.Array,
        query_starts: jax.Array,
        slots: jax.Array,
        **options: Any,
    ) -> tuple[Any, jax.Array, jax.Array]:
        scales = {name: options[name] for name in ("k_scale", "v_scale", "kv_dtype")}
        k_pool, v_pool = write_kv(k, v, k_pool, v_pool, slots, **scales)
        out = implementation.attend(
            q, k_pool, v_pool, block_tables, context_lens, query_starts, **options
        )
        return out, k_pool, v_pool

    return run
