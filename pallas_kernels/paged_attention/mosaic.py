"""Paged attention on Pallas Mosaic GPU, for NVIDIA Hopper (compute capability 9.0a: TMA and wgmma).

One kernel serves both passes (passes.py). A thread block takes one work item, one KV head and one
split. Its producer warpgroup walks the block table and has the tensor memory accelerator bring
blocks into a ring of shared-memory stages; its one or two consumer warpgroups take 64 rows each, a
row being a (query token, head of the group) pair, so that every K and V tile is read once per KV
head. Two matrix products with f32 accumulators and an online softmax per tile: FlashAttention-3
(arXiv:2407.08608), with the keys gathered by block.

The kernel keeps to what JAX's GPU interpreter can run, so that the form that is tested without a
GPU is the form that is compiled: P goes through shared memory, and each product has an accumulator
of its own that is added to the running one in registers (a multiply-add, where scaling the
accumulator in place would be a multiply).
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import tuning
from pallas_kernels.paged_attention.bounds import tile_bounds
from pallas_kernels.paged_attention.contract import HEAD_DIMS, Case
from pallas_kernels.paged_attention.passes import attend_in_passes
from pallas_kernels.paged_attention.pool import Scale
from pallas_kernels.paged_attention.split_plan import num_splits
from pallas_kernels.paged_attention.work_list import WorkList, tiles_of_rows

MASKED = -1e30
# Rows of one warpgroup: the M of a wgmma instruction.
ROWS = 64
# Registers per thread where three warpgroups share a multiprocessor's 65536.
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
LOG2E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Plan:
    """One compiled form of the kernel: everything static."""

    tile: tuning.MosaicTile
    splits: int
    tokens: int  # query tokens per warpgroup
    stored_rows: int  # rows of q and out per work item
    heads: int  # query heads per thread block
    chunks: int  # thread blocks per KV head
    group: int
    head_dim: int
    block_size: int
    window: int | None
    soft_cap: float | None
    dtype: np.dtype  # of q and of the products' operands
    kv_dtype: np.dtype
    out_dtype: np.dtype

    @property
    def quantised(self) -> bool:
        return self.kv_dtype != self.dtype


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
            stored_rows=pl.cdiv(heads, 8) * 8 if decoding else ROWS * tile.consumers,
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
    tile_tokens = prompt_plan.tokens * prompt_plan.tile.consumers

    def decode_kernel(q: jax.Array, work: WorkList) -> tuple[jax.Array, jax.Array]:
        unpack = functools.partial(
            _unpack_rows, decode_plan, item=work.request, token=jnp.zeros_like(work.row)
        )
        out, lse = run(decode_plan, q, work)
        return jax.vmap(unpack)(out), jax.vmap(unpack)(lse)

    def prompt_kernel(q: jax.Array, work: WorkList) -> tuple[jax.Array, jax.Array]:
        item, token = tiles_of_rows(query_starts, T, tile_tokens)
        out, lse = run(prompt_plan, q, work)
        return tuple(_unpack_rows(prompt_plan, x[0], item, token) for x in (out, lse))

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
    body = functools.partial(_kernel, plan=plan)
    phase = "decode" if plan.out_dtype == jnp.float32 else "prompt"
    body.__name__ = f"paged_attention_{phase}"  # type: ignore[attr-defined]
    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((*shape, D), plan.out_dtype),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        scratch_types=_scratch(plan),
        grid=(items, units, plan.splits),
        grid_names=("item", "unit", "split"),
        num_threads=plan.tile.consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(packed, k_pool, v_pool, table, k_factor, *work)


def _rows(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Of each stored row, which token of the item and which head of the unit it is, int[N] each.

    Rows left over hold some live (token, head) again; what is computed there is not read.
    """
    row = np.arange(plan.stored_rows)
    group, place = row // ROWS, row % ROWS
    token = np.minimum(place // plan.heads, plan.tokens - 1) + group * plan.tokens
    return token, np.minimum(place % plan.heads, plan.heads - 1)


def _unpack_rows(plan: Plan, stored: jax.Array, item: jax.Array, token: jax.Array) -> jax.Array:
    """Rows of q, as [T, H, ...], out of stored [W, U, N, ...]; item and token i32[T] say where each
    row's token is.
    """
    heads = np.arange(plan.group * stored.shape[1] // plan.chunks)
    in_group = heads % plan.group
    unit = heads // plan.group * plan.chunks + in_group // plan.heads
    row = token // plan.tokens * ROWS + token % plan.tokens * plan.heads
    return stored[item[:, None], unit[None, :], row[:, None] + in_group % plan.heads]


def _shared(shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """A shared-memory buffer laid out for wgmma and TMA."""
    bits = dtype.itemsize * 8
    swizzle = plgpu.find_swizzle(shape[-1] * bits)
    tiling = plgpu.TilingTransform((8, 8 * swizzle // bits))
    transforms = (tiling,) if swizzle == 16 else (tiling, plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _scratch(plan: Plan) -> dict[str, Any]:
    """Shared memory and barriers of one thread block."""
    tile, D = plan.tile, plan.head_dim
    copies = tile.keys // plan.block_size
    ring = (tile.stages, tile.keys, D)
    scratch = {
        "q": _shared((tile.consumers, ROWS, D), plan.dtype),
        "k": _shared(ring, plan.kv_dtype),
        "v": _shared(ring, plan.kv_dtype),
        "weights": _shared((tile.consumers, ROWS, tile.keys), plan.dtype),
        "lse": plgpu.SMEM((tile.consumers, ROWS), jnp.float32),
        "q_here": plgpu.Barrier(num_barriers=tile.consumers),
        "k_here": plgpu.Barrier(num_barriers=tile.stages, num_arrivals=copies),
        "v_here": plgpu.Barrier(num_barriers=tile.stages, num_arrivals=copies),
        "free": plgpu.Barrier(num_barriers=tile.stages, num_arrivals=tile.consumers),
    }
    if plan.out_dtype == jnp.float32:
        scratch["out"] = _shared((tile.consumers, ROWS, tile.columns), plan.out_dtype)
    if plan.quantised or tile.consumers > 1:
        scratch["v_work"] = _shared((tile.consumers, tile.keys, D), plan.dtype)
    if plan.quantised:
        scratch["k_work"] = _shared((tile.consumers, tile.keys, D), plan.dtype)
    return scratch


def _kernel(
    q_ref,
    k_ref,
    v_ref,
    table_ref,
    factor_ref,
    request_ref,
    row_ref,
    tokens_ref,
    position_ref,
    out_ref,
    lse_ref,
    *,
    plan: Plan,
    **shared,
):
    del row_ref
    item, unit, split = (lax.axis_index(name) for name in ("item", "unit", "split"))
    warpgroup = lax.axis_index("warpgroup")
    kv_head = lax.div(unit, jnp.int32(plan.chunks))
    tokens, first_position = tokens_ref[item], position_ref[item]
    bounds = tile_bounds(
        first_position,
        tokens,
        split,
        keys=plan.tile.keys,
        splits=plan.splits,
        window=plan.window,
    )

    @pl.when(tokens > 0)
    def _():
        @pl.when(warpgroup == plan.tile.consumers)
        def _():
            _produce(k_ref, v_ref, table_ref, request_ref[item], kv_head, bounds, shared, plan)

        @pl.when(warpgroup < plan.tile.consumers)
        def _():
            _consume(
                q_ref.at[item, unit],
                out_ref.at[split, item, unit],
                lse_ref.at[split, item, unit],
                factor_ref[kv_head],
                first_position,
                bounds,
                shared,
                plan,
            )


def _produce(k_ref, v_ref, table_ref, request, kv_head, bounds, shared, plan: Plan):
    """Bring the tiles first .. last - 1 into the ring, one copy per block."""
    tile = plan.tile
    blocks = tile.keys // plan.block_size
    if tile.consumers > 1:
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

    def block_ids(tile_index):
        # One tile ahead of its use, so that the reads of the table do not hold up the copies.
        at = jnp.minimum(tile_index, jnp.maximum(bounds.last - 1, 0)) * blocks
        return tuple(table_ref[request, at + j] for j in range(blocks))

    def step(tile_index, ids):
        done = tile_index - bounds.first
        slot = lax.rem(done, jnp.int32(tile.stages))
        following = block_ids(tile_index + 1)

        @pl.when(done >= tile.stages)
        def _():
            plgpu.barrier_wait(shared["free"].at[slot])

        for pool, ring, here in ((k_ref, "k", "k_here"), (v_ref, "v", "v_here")):
            for j, block in enumerate(ids):
                rows = pl.ds(j * plan.block_size, plan.block_size)
                plgpu.copy_gmem_to_smem(
                    pool.at[block, kv_head],
                    shared[ring].at[slot, rows],
                    shared[here].at[slot],
                )
        return following

    lax.fori_loop(bounds.first, bounds.last, step, block_ids(bounds.first))

    # The ring is handed back whole: every phase of its barriers is waited for.
    @pl.loop(jnp.maximum(bounds.last - tile.stages, bounds.first), bounds.last)
    def _(tile_index):
        plgpu.barrier_wait(
            shared["free"].at[lax.rem(tile_index - bounds.first, jnp.int32(tile.stages))]
        )


def _consume(q_ref, out_ref, lse_ref, factor, first_position, bounds, shared, plan: Plan):
    """Attention of this warpgroup's 64 rows over the tiles of the ring."""
    tile, D = plan.tile, plan.head_dim
    me = lax.axis_index("warpgroup") if tile.consumers > 1 else 0
    if tile.consumers > 1:
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
    matrix, column = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)
    q_smem = shared["q"].at[me]
    rows_here = min(plan.stored_rows, ROWS)
    mine = pl.ds(me * ROWS, rows_here)
    plgpu.copy_gmem_to_smem(q_ref.at[mine], q_smem.at[pl.ds(0, rows_here)], shared["q_here"].at[me])
    plgpu.barrier_wait(shared["q_here"].at[me])

    def full(shape, value, layout):
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def spread(x, columns):
        return lax.broadcast_in_dim(x, (ROWS, columns), [0])

    def step(tile_index, state, masked):
        accumulators, peak, denominator = state
        slot = lax.rem(tile_index - bounds.first, jnp.int32(tile.stages))
        start = tile_index * tile.keys
        k_smem, v_smem = shared["k"].at[slot], shared["v"].at[slot]
        plgpu.barrier_wait(shared["k_here"].at[slot])
        if plan.quantised:
            _convert(k_smem, shared["k_work"].at[me], plan)
            plgpu.commit_smem()
            k_smem = shared["k_work"].at[me]

        def scores(accumulator):
            plgpu.wgmma(accumulator, q_smem, k_smem.transpose((1, 0)))
            return accumulator[...]

        logits = pl.run_scoped(scores, plgpu.ACC((ROWS, tile.keys), jnp.float32))
        if plan.soft_cap is None:
            logits = logits * (factor * LOG2E)
        else:
            logits = jnp.tanh(logits * (factor / plan.soft_cap)) * (plan.soft_cap * LOG2E)
        if masked:
            visible = _visible(first_position, start, me, plan)
            logits = jnp.where(visible, logits, MASKED)
        new_peak = jnp.maximum(peak, logits.max(axis=1))
        weights = jnp.exp2(logits - spread(new_peak, tile.keys))
        if masked:
            weights = jnp.where(visible, weights, 0.0)
        shrink = jnp.exp2(peak - new_peak)
        denominator = denominator * shrink + weights.sum(axis=1)
        shared["weights"].at[me][...] = weights.astype(plan.dtype)
        plgpu.barrier_wait(shared["v_here"].at[slot])
        if plan.quantised or masked:
            target = shared["v_work"].at[me] if "v_work" in shared else v_smem
            limits = (bounds.lowest - start, bounds.end - start) if masked else None
            _convert(v_smem, target, plan, limits)
            v_smem = target
        plgpu.commit_smem()

        def product(columns):
            def run(accumulator):
                plgpu.wgmma(accumulator, shared["weights"].at[me], v_smem.at[:, columns])
                return accumulator[...]

            return pl.run_scoped(run, plgpu.ACC((ROWS, tile.columns), jnp.float32))

        wide = spread(shrink, tile.columns)
        accumulators = tuple(
            old * wide + product(pl.ds(i * tile.columns, tile.columns))
            for i, old in enumerate(accumulators)
        )
        plgpu.barrier_arrive(shared["free"].at[slot])
        return accumulators, new_peak, denominator

    parts = D // tile.columns
    state = (
        tuple(full((ROWS, tile.columns), 0.0, matrix) for _ in range(parts)),
        full((ROWS,), MASKED, column),
        full((ROWS,), 0.0, column),
    )
    masked = functools.partial(step, masked=True)
    whole = functools.partial(step, masked=False)
    if plan.window is not None:
        state = lax.fori_loop(bounds.first, bounds.whole_from, masked, state)
    state = lax.fori_loop(bounds.whole_from, bounds.whole_to, whole, state)
    accumulators, peak, denominator = lax.fori_loop(bounds.whole_to, bounds.last, masked, state)

    empty = denominator == 0.0
    safe = jnp.where(empty, 1.0, denominator)
    shared["lse"].at[me][...] = jnp.where(
        empty, -jnp.inf, (peak + jnp.log(safe) * LOG2E) * (1 / LOG2E)
    )
    inverse = spread(1.0 / safe, tile.columns)
    stage = shared.get("out")
    for i, accumulator in enumerate(accumulators):
        columns = pl.ds(i * tile.columns, tile.columns)
        value = (accumulator * inverse).astype(plan.out_dtype)
        if stage is None:
            q_smem.at[:, columns][...] = value
            continue
        stage.at[me][...] = value
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(stage.at[me, pl.ds(0, rows_here)], out_ref.at[mine, columns])
        plgpu.wait_smem_to_gmem(0)
    plgpu.commit_smem()
    if stage is None:
        plgpu.copy_smem_to_gmem(q_smem, out_ref.at[mine])
    plgpu.copy_smem_to_gmem(shared["lse"].at[me, pl.ds(0, rows_here)], lse_ref.at[mine])
    plgpu.wait_smem_to_gmem(0)


def _visible(first_position, start, me, plan: Plan):
    """bool[64, keys]: which keys of the tile from `start` on each row of this warpgroup sees."""
    shape = (ROWS, plan.tile.keys)
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
    key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    token = lax.div(row, jnp.int32(plan.heads)) if plan.tokens > 1 else jnp.zeros_like(row)
    # How far a key lies behind the row's own position.
    behind = token - key + (first_position + me * plan.tokens - start)
    visible = behind >= 0
    if plan.window is not None:
        visible &= behind < plan.window
    return visible


def _convert(source, target, plan: Plan, limits=None):
    """Copy a tile [keys, D] as numbers of the products' type, with zero for rows outside limits
    (from, to).
    """
    x = plgpu.layout_cast(source[...], plgpu.Layout.WGMMA)
    if plan.quantised:
        if plan.kv_dtype.kind == "f":
            x = x.astype(jnp.float16)
        x = x.astype(jnp.float32)
    if limits is not None:
        row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=plgpu.Layout.WGMMA)
        x = jnp.where((row >= limits[0]) & (row < limits[1]), x, jnp.zeros_like(x))
    target[...] = x.astype(plan.dtype)
