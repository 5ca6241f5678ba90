"""Paged attention on Pallas Mosaic GPU, for NVIDIA Hopper (compute capability 9.0a: TMA and wgmma).

One kernel (mosaic_kernel.py) serves both passes (passes.py). XLA packs q by work item, so that a
thread block's rows, a row being a (query token, head of the group) pair, are one TMA box, and
unpacks out: K and V are read once per KV head, Q and out once more than need be. Two matrix
products with f32 accumulators and an online softmax per tile: FlashAttention-3 (arXiv:2407.08608),
with the keys gathered by block.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import tuning
from pallas_kernels.paged_attention.contract import HEAD_DIMS, Case
from pallas_kernels.paged_attention.mosaic_kernel import ROWS, Plan, kernel, scratch
from pallas_kernels.paged_attention.passes import attend_in_passes
from pallas_kernels.paged_attention.pool import Scale
from pallas_kernels.paged_attention.split_plan import num_splits
from pallas_kernels.paged_attention.work_list import WorkList, tiles_of_rows


def unavailable() -> str | None:
    """Why this implementation cannot run in this process; it can, if only interpreted."""
    return None


def refusal(case: Case) -> str | None:
    """Why the kernel cannot do `case`, or None."""
    if case.head_dim not in HEAD_DIMS:
        return f"head_dim {case.head_dim} is not one of {HEAD_DIMS}"
    if case.stored_as_bits:
        return f"a {case.pool_dtype} pool of {case.kv_dtype}: on GPUs pools hold numbers"
    if case.block_size not in (8, 16, 32, 64):
        return f"block size {case.block_size} is not one of 8, 16, 32, 64"
    if case.query_dtype == "float32":
        return "query dtype float32: wgmma would round it to tf32"
    if case.kv_dtype not in (case.query_dtype, "float8_e4m3fn", "float8_e5m2", "int8"):
        return f"kv_dtype {case.kv_dtype} with {case.query_dtype} queries: a product takes one type"
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
    interpret: Any = None,
    splits: int | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """paged_attention of api.py.

    interpret: parameters of JAX's GPU interpreter; splits overrides the split plan.
    """
    T, H, D = q.shape
    _, K, B, _ = k_pool.shape
    R, M = block_tables.shape
    G = H // K
    heads = min(G, ROWS)
    chunks = pl.cdiv(G, heads)

    def plan(phase: tuning.Phase) -> Plan:
        tile = tuning.mosaic_tile(D, kv_dtype.itemsize, phase)
        decoding = phase == "decode"
        automatic = num_splits(
            R * K * chunks,
            pl.cdiv(M * B, tile.keys),
            tuning.target("9.0").multiprocessors * tile.blocks_per_sm,
        )
        return Plan(
            tile=tile,
            splits=(splits or automatic) if decoding else 1,
            tokens=1 if decoding else ROWS // heads,
            stored_rows=pl.cdiv(heads, 8) * 8 if decoding else ROWS * tile.row_groups,
            heads=heads,
            chunks=chunks,
            group=G,
            head_dim=D,
            block_size=B,
            window=window,
            soft_cap=soft_cap,
            dtype=q.dtype,
            kv_dtype=kv_dtype,
            out_dtype=jnp.dtype(jnp.float32) if decoding else q.dtype,
        )

    k_factor = jnp.broadcast_to(
        jnp.asarray(1.0 if k_scale is None else k_scale, jnp.float32) * scale, (K,)
    )

    def run(plan: Plan, q: jax.Array, work: WorkList) -> tuple[jax.Array, jax.Array]:
        return _call(plan, q, k_pool, v_pool, block_tables, k_factor, work, interpret)

    decode_plan, prompt_plan = plan("decode"), plan("prompt")
    tile_tokens = prompt_plan.tokens * prompt_plan.tile.row_groups

    def decode_kernel(q: jax.Array, work: WorkList) -> tuple[jax.Array, jax.Array]:
        unpack = functools.partial(
            _unpack_rows, decode_plan, item=work.request, token=jnp.zeros_like(work.row)
        )
        out, lse = run(decode_plan, q, work)
        return jax.vmap(unpack)(out), jax.vmap(unpack)(lse)

    def prompt_kernel(q: jax.Array, work: WorkList) -> tuple[jax.Array, jax.Array]:
        item, token = tiles_of_rows(query_starts, T, tile_tokens)
        out, lse = run(prompt_plan, q, work)
        unpack = functools.partial(_unpack_rows, prompt_plan, item=item, token=token)
        return unpack(out[0]), unpack(lse[0])

    return attend_in_passes(
        q,
        context_lens,
        query_starts,
        kv_heads=K,
        tile_tokens=tile_tokens,
        decode_kernel=decode_kernel,
        prompt_kernel=prompt_kernel,
        sinks=sinks,
        v_scale=v_scale,
        return_lse=return_lse,
        decode=decode,
    )


def _call(
    plan: Plan,
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    k_factor: jax.Array,
    work: WorkList,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Run the kernel over all work items: (out [S, W, U, N, D], lse f32[S, W, U, N]).

    W items, U units of a KV head and a part of its group, N stored rows.
    """
    T, _, D = q.shape
    K, B = k_pool.shape[1:3]
    items, units = work.request.shape[0], K * plan.chunks
    token, head_in_unit = _rows(plan)
    unit = np.arange(units)
    head_in_group = np.minimum(
        unit[:, None] % plan.chunks * plan.heads + head_in_unit, plan.group - 1
    )
    heads = unit[:, None] // plan.chunks * plan.group + head_in_group
    rows = jnp.minimum(work.row[:, None] + token, T - 1)
    packed = q[rows[:, None, :], heads[None]]
    blocks = plan.tile.keys // B
    table = jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % blocks)))
    shape = (plan.splits, items, units, plan.stored_rows)
    body = functools.partial(kernel, plan=plan)
    phase = "decode" if plan.out_dtype == jnp.float32 else "prompt"
    body.__name__ = f"paged_attention_{phase}"  # type: ignore[attr-defined]
    run = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((*shape, D), plan.out_dtype),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        scratch_types=scratch(plan),
        grid=(items, units, plan.splits),
        grid_names=("item", "unit", "split"),
        num_threads=plan.tile.consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return run(packed, k_pool, v_pool, table, k_factor, *work)


def _rows(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Of each stored row, which token of the item and which head of the unit it is, int[N] each.

    Rows left over hold some live (token, head) again; what is computed there is not read.
    """
    row = np.arange(plan.stored_rows)
    group, place = row // ROWS, row % ROWS
    token = np.minimum(place // plan.heads, plan.tokens - 1) + group * plan.tokens
    return token, np.minimum(place % plan.heads, plan.heads - 1)


def _unpack_rows(plan: Plan, stored: jax.Array, item: jax.Array, token: jax.Array) -> jax.Array:
    """Rows [T, H, ...] out of stored [W, U, N, ...]; item, token i32[T] say where each row is."""
    heads = np.arange(plan.group * stored.shape[1] // plan.chunks)
    in_group = heads % plan.group
    unit = heads // plan.group * plan.chunks + in_group // plan.heads
    row = token // plan.tokens * ROWS + token % plan.tokens * plan.heads
    return stored[item[:, None], unit[None, :], row[:, None] + in_group % plan.heads]
