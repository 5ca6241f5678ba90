"""The device code of mosaic.py: what one thread block does.

A thread block takes one work item, one KV head (or a part of its group) and one split. The producer
warpgroup has the tensor memory accelerator bring blocks into a ring of shared-memory stages; each
consumer warpgroup takes 64 rows and all of head_dim, or, where head_dim is 256 and the accumulators
would not fit its registers, 64 rows shared by two of them, a half of head_dim each.

The code keeps to what JAX's GPU interpreter can run, so that the form that is tested without a GPU
is the form that is compiled: P goes through shared memory, and each product has an accumulator of
its own that is added to the running one in registers (a multiply-add, where scaling the accumulator
in place would be a multiply).
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import tuning
from pallas_kernels.paged_attention.bounds import tile_bounds

# A masked logit lies below the least peak, so that its weight is zero also in a row that has seen
# no key yet.
MASKED, LEAST_PEAK = -2e30, -1e30
# Rows of one warpgroup: the M of a wgmma instruction.
ROWS = 64
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


def _shared(shape: tuple[int, ...], dtype: np.dtype, columns: int | None = None) -> Any:
    """A shared-memory buffer laid out for wgmma and TMA, its swizzle that of rows of `columns`."""
    bits = dtype.itemsize * 8
    swizzle = plgpu.find_swizzle((columns or shape[-1]) * bits)
    # mypy takes an inherited method without a body for an abstract one.
    transforms: list[Any] = [plgpu.TilingTransform((8, 8 * swizzle // bits))]  # type: ignore[abstract]
    if swizzle > 16:
        transforms.append(plgpu.SwizzleTransform(swizzle))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=tuple(transforms))


def scratch(plan: Plan) -> dict[str, Any]:
    """Shared memory and barriers of one thread block."""
    tile, D = plan.tile, plan.head_dim
    copies = tile.keys // plan.block_size
    ring = (tile.stages, tile.keys, D)
    # Raw numbers are converted piece by piece, never an operand of a product.
    piece = tile.columns if plan.quantised else None
    buffers = {
        "q": _shared((tile.row_groups, ROWS, D), plan.dtype),
        "k": _shared(ring, plan.kv_dtype, piece),
        "v": _shared(ring, plan.kv_dtype, piece),
        # The operands of a product share one tiling, and V has that of head_dim.
        "weights": _shared((tile.consumers, ROWS, tile.keys), plan.dtype, columns=D),
        "lse": plgpu.SMEM((tile.consumers, ROWS), jnp.float32),
        "q_here": plgpu.Barrier(num_barriers=tile.row_groups),
        "k_here": plgpu.Barrier(num_barriers=tile.stages, num_arrivals=copies),
        "v_here": plgpu.Barrier(num_barriers=tile.stages, num_arrivals=copies),
        "free": plgpu.Barrier(num_barriers=tile.stages, num_arrivals=tile.consumers),
    }
    if plan.out_dtype == jnp.float32 or tile.column_groups > 1:
        buffers["out"] = _shared((tile.consumers, ROWS, tile.columns), plan.out_dtype)
    if plan.quantised:
        for name in ("k_work", "v_work"):
            buffers[name] = _shared((tile.row_groups, tile.keys, D), plan.dtype)
    # Where consumers share what one of them writes, they meet: converted K with half the columns
    # from each, and a stage's V with its unused rows cleared by the first.
    meetings: tuple[str, ...] = ()
    if plan.quantised and tile.column_groups > 1:
        meetings = ("converted", "used")
    elif not plan.quantised and tile.row_groups > 1:
        meetings = ("cleared",)
    for name in meetings:
        buffers[name] = plgpu.Barrier(num_arrivals=tile.consumers)
    return buffers


def kernel(
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
    """One thread block of the grid (work item, unit, split).

    q_ref [W, U, N, D], k_ref and v_ref [P, K, B, D], table_ref i32[R, M], factor_ref f32[K] (the
    scale of the logits), four i32[W] of a WorkList; out_ref [S, W, U, N, D], lse_ref f32[S, W, U,
    N]. `shared` is what scratch() lists.
    """
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
        plgpu.set_max_registers(tile.producer_registers, action="decrease")

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
    group = me if tile.column_groups == 1 else 0
    if tile.consumers > 1:
        plgpu.set_max_registers(tile.consumer_registers, action="increase")
    matrix, column = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)
    # The first consumer of these rows.
    leads = me == group
    width = D // tile.column_groups
    first_column = 0 if tile.column_groups == 1 else me * width
    parts = range(width // tile.columns)
    my_columns = [pl.ds(first_column + i * tile.columns, tile.columns) for i in parts]
    q_smem = shared["q"].at[group]
    rows_here = min(plan.stored_rows, ROWS)
    mine = pl.ds(group * ROWS, rows_here)

    @pl.when(leads)
    def _():
        here = q_smem.at[pl.ds(0, rows_here)]
        plgpu.copy_gmem_to_smem(q_ref.at[mine], here, shared["q_here"].at[group])

    plgpu.barrier_wait(shared["q_here"].at[group])

    def full(shape, value, layout):
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def meet(barrier):
        """Wait for the other consumer, where there is one to wait for."""
        if barrier in shared:
            plgpu.barrier_arrive(shared[barrier])
            plgpu.barrier_wait(shared[barrier])

    def clear_unused(v_smem, limits):
        """Zero the rows of V outside the context: a NaN there would outlive a weight of zero."""

        @pl.when((limits[0] > 0) | (limits[1] < tile.keys))
        def _():
            @pl.when((me == 0) | (tile.column_groups > 1))
            def _():
                _convert(v_smem, v_smem, my_columns, plan, limits)
                plgpu.commit_smem()

            meet("cleared")

    def spread(x, columns):
        return lax.broadcast_in_dim(x, (ROWS, columns), [0])

    def step(tile_index, state, masked):
        accumulators, peak, denominator = state
        slot = lax.rem(tile_index - bounds.first, jnp.int32(tile.stages))
        start = tile_index * tile.keys
        k_smem, v_smem = shared["k"].at[slot], shared["v"].at[slot]
        plgpu.barrier_wait(shared["k_here"].at[slot])
        limits = (bounds.lowest - start, bounds.end - start) if masked else None
        if plan.quantised:
            # V with K, while few registers are in use; the stage is free from here on.
            plgpu.barrier_wait(shared["v_here"].at[slot])
            _convert(k_smem, shared["k_work"].at[group], my_columns, plan)
            _convert(v_smem, shared["v_work"].at[group], my_columns, plan, limits)
            k_smem, v_smem = shared["k_work"].at[group], shared["v_work"].at[group]
            plgpu.commit_smem()
            plgpu.barrier_arrive(shared["free"].at[slot])
            meet("converted")

        def scores(accumulator):
            plgpu.wgmma(accumulator, q_smem, k_smem.transpose((1, 0)))
            return accumulator[...]

        logits = pl.run_scoped(scores, plgpu.ACC((ROWS, tile.keys), jnp.float32))
        meet("used")
        if plan.soft_cap is None:
            logits = logits * (factor * LOG2E)
        else:
            logits = jnp.tanh(logits * (factor / plan.soft_cap)) * (plan.soft_cap * LOG2E)
        if masked:
            logits = jnp.where(_visible(first_position, start, group, plan), logits, MASKED)
        new_peak = jnp.maximum(peak, logits.max(axis=1))
        weights = jnp.exp2(logits - spread(new_peak, tile.keys))
        shrink = jnp.exp2(peak - new_peak)
        denominator = denominator * shrink + weights.sum(axis=1)
        shared["weights"].at[me][...] = weights.astype(plan.dtype)
        if not plan.quantised:
            plgpu.barrier_wait(shared["v_here"].at[slot])
            if masked:
                clear_unused(v_smem, limits)
        plgpu.commit_smem()

        def product(columns):
            def run(accumulator):
                plgpu.wgmma(accumulator, shared["weights"].at[me], v_smem.at[:, columns])
                return accumulator[...]

            return pl.run_scoped(run, plgpu.ACC((ROWS, tile.columns), jnp.float32))

        wide = spread(shrink, tile.columns)
        accumulators = tuple(
            old * wide + product(my_columns[i]) for i, old in enumerate(accumulators)
        )
        if not plan.quantised:
            plgpu.barrier_arrive(shared["free"].at[slot])
        return accumulators, new_peak, denominator

    state = (
        tuple(full((ROWS, tile.columns), 0.0, matrix) for _ in parts),
        full((ROWS,), LEAST_PEAK, column),
        full((ROWS,), 0.0, column),
    )
    masked = functools.partial(step, masked=True)
    whole = functools.partial(step, masked=False)
    if plan.quantised or plan.window is not None:
        # Masking every tile costs less than the registers that a second loop's addresses take.
        state = lax.fori_loop(bounds.first, bounds.last, masked, state)
    else:
        state = lax.fori_loop(bounds.first, bounds.whole_to, whole, state)
        state = lax.fori_loop(bounds.whole_to, bounds.last, masked, state)
    accumulators, peak, denominator = state

    empty = denominator == 0.0
    safe = jnp.where(empty, 1.0, denominator)
    shared["lse"].at[me][...] = jnp.where(
        empty, -jnp.inf, (peak + jnp.log(safe) * LOG2E) * (1 / LOG2E)
    )
    inverse = spread(1.0 / safe, tile.columns)
    stage = shared.get("out")
    for columns, accumulator in zip(my_columns, accumulators, strict=True):
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

    @pl.when(leads)
    def _():
        plgpu.copy_smem_to_gmem(shared["lse"].at[me, pl.ds(0, rows_here)], lse_ref.at[mine])

    plgpu.wait_smem_to_gmem(0)


def _visible(first_position, start, group, plan: Plan):
    """bool[64, keys]: which keys of the tile from `start` on each row of this warpgroup sees."""
    shape = (ROWS, plan.tile.keys)
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
    key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    token = lax.div(row, jnp.int32(plan.heads)) if plan.tokens > 1 else jnp.zeros_like(row)
    # How far a key lies behind the row's own position.
    behind = token - key + (first_position + group * plan.tokens - start)
    visible = behind >= 0
    if plan.window is not None:
        visible &= behind < plan.window
    return visible


def _convert(source, target, columns, plan: Plan, limits=None):
    """Copy columns of a tile [keys, D] as numbers of the products' type.

    columns: slices, taken one after the other for the registers' sake. Rows outside limits
    (from, to) become zero.
    """
    for part in columns:
        x = plgpu.layout_cast(source.at[:, part][...], plgpu.Layout.WGMMA)
        if plan.quantised:
            if plan.kv_dtype.kind != "i":
                x = x.astype(jnp.float16)
            x = x.astype(jnp.float32)
        if limits is not None:
            row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=plgpu.Layout.WGMMA)
            x = jnp.where((row >= limits[0]) & (row < limits[1]), x, jnp.zeros_like(x))
        target.at[:, part][...] = x.astype(plan.dtype)
