"""Paged attention on Pallas-Triton, for NVIDIA GPUs from Ampere on.

JAX has deprecated this backend and will remove it. It is kept, in this file alone, for Ampere and
Ada, which the Mosaic kernel does not serve; the way out is the same kernel through jax_triton,
whose call takes the same grid and operands. Every call names its compiler parameters, because which
backend `pallas_call` means without them has changed between versions.

One kernel serves both passes (passes.py). A thread block takes one work item and one KV head: up to
`rows` rows, each a (query token, head of the group) pair, so that K and V are read once per KV
head, and walks the keys in tiles gathered through the block table, whatever the block size.
FlashAttention-2 (arXiv:2307.08691) with base-2 exponentials.
"""

import functools
import math
import warnings
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.paged_attention import tuning
from pallas_kernels.paged_attention.bounds import tile_bounds
from pallas_kernels.paged_attention.contract import HEAD_DIMS, Case
from pallas_kernels.paged_attention.passes import attend_in_passes
from pallas_kernels.paged_attention.pool import Scale
from pallas_kernels.paged_attention.split_plan import num_splits
from pallas_kernels.paged_attention.work_list import WorkList

# Emitted while lowering, long after the call that is to blame has returned.
warnings.filterwarnings(
    "ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning
)

# A masked logit lies below the least peak, so that its weight is zero also in a row that has seen
# no key yet.
MASKED, LEAST_PEAK = -2e30, -1e30
# Heads of one KV head that a thread block takes at most; larger groups are cut.
MOST_HEADS = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """One compiled form of the kernel: everything static."""

    tile: tuning.TritonTile
    splits: int
    tokens: int  # query tokens per work item
    heads: int  # query heads per thread block
    chunks: int  # thread blocks per KV head
    group: int
    head_dim: int
    block_size: int
    scale: float
    window: int | None
    soft_cap: float | None
    compute_dtype: np.dtype
    out_dtype: np.dtype


def unavailable() -> str | None:
    """Why this implementation cannot run in this process; it can, if only interpreted."""
    return None


def refusal(case: Case) -> str | None:
    """Why the kernel cannot do `case`, or None."""
    if case.head_dim not in HEAD_DIMS:
        return f"head_dim {case.head_dim} is not one of {HEAD_DIMS}"
    if case.stored_as_bits:
        return f"a {case.pool_dtype} pool of {case.kv_dtype}: on GPUs pools hold numbers"
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
    interpret: bool = False,
    capability: str | None = None,
    splits: int | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """paged_attention of api.py.

    interpret runs the kernel's steps as plain XLA, on any platform; capability, as "9.0", and
    splits override what the tuning table and the split plan would choose.
    """
    _, H, D = q.shape
    _, K, B, _ = k_pool.shape
    R, M = block_tables.shape
    G = H // K
    gpu = tuning.target(capability)
    heads = min(G, MOST_HEADS)
    chunks = pl.cdiv(G, heads)

    def plan(phase: tuning.Phase) -> Plan:
        tile = tuning.triton_tile(gpu.capability, D, heads, kv_dtype.itemsize, phase)
        decoding = phase == "decode"
        automatic = num_splits(
            R * K * chunks, pl.cdiv(M * B, tile.keys), gpu.multiprocessors * tile.blocks_per_sm
        )
        return Plan(
            tile=tile,
            splits=(splits or automatic) if decoding else 1,
            tokens=1 if decoding else max(tile.rows // heads, 1),
            heads=heads,
            chunks=chunks,
            group=G,
            head_dim=D,
            block_size=B,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            compute_dtype=compute_dtype(q.dtype, kv_dtype),
            out_dtype=jnp.dtype(jnp.float32) if decoding else q.dtype,
        )

    k_factor = jnp.broadcast_to(
        jnp.asarray(1.0 if k_scale is None else k_scale, jnp.float32) * scale, (K,)
    )

    def run(plan: Plan, q: jax.Array, work: WorkList) -> tuple[jax.Array, jax.Array]:
        return _call(plan, q, k_pool, v_pool, block_tables, k_factor, work, interpret)

    def prompt_kernel(q: jax.Array, work: WorkList) -> tuple[jax.Array, jax.Array]:
        out, lse = run(plan("prompt"), q, work)
        return out[0], lse[0]

    return attend_in_passes(
        q,
        context_lens,
        query_starts,
        kv_heads=K,
        tile_tokens=plan("prompt").tokens,
        decode_kernel=functools.partial(run, plan("decode")),
        prompt_kernel=prompt_kernel,
        sinks=sinks,
        v_scale=v_scale,
        return_lse=return_lse,
        decode=decode,
    )


def compute_dtype(query: jax.typing.DTypeLike, numbers: jax.typing.DTypeLike) -> np.dtype:
    """The type of the products' operands.

    That of q over quantised numbers, else one that holds both.
    """
    if jnp.dtype(numbers).itemsize == 1:
        return jnp.dtype(query)
    return jnp.promote_types(query, numbers)


def _call(
    plan: Plan,
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    k_factor: jax.Array,
    work: WorkList,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Run the kernel over all work items: (out [S, T, H, D], lse f32[S, T, H])."""
    T, H, D = q.shape
    K = k_pool.shape[1]
    lanes = pl.next_power_of_2(D)
    # A masked lane keeps an index of its own, inside the array: the interpreter stores masked lanes
    # as they were, and an index that is clamped onto a live row would overwrite it.
    spare_rows = plan.tile.rows // plan.heads + 1
    spare_heads = plan.chunks * plan.heads - plan.group
    shape = (plan.splits, T + spare_rows, H + spare_heads, lanes)
    out, lse = pl.pallas_call(
        functools.partial(_kernel, plan=plan),
        name=f"paged_attention_{'decode' if plan.tokens == 1 else 'prompt'}",
        grid=(work.request.shape[0], K * plan.chunks, plan.splits),
        out_shape=(
            jax.ShapeDtypeStruct(shape, plan.out_dtype),
            jax.ShapeDtypeStruct(shape[:3], jnp.float32),
        ),
        compiler_params=plt.CompilerParams(num_warps=plan.tile.warps, num_stages=plan.tile.stages),
        interpret=interpret,
    )(q, k_pool, v_pool, block_tables, k_factor, *work)
    return out[:, :T, :H, :D], lse[:, :T, :H]


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
):
    """One work item, one KV head (or a part of its group), one split."""
    item, unit, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    kv_head = unit // plan.chunks
    tokens = tokens_ref[item]

    @pl.when(tokens > 0)
    def _():
        request, first_row, first_position = request_ref[item], row_ref[item], position_ref[item]
        rows, keys = plan.tile.rows, plan.tile.keys
        index = jnp.arange(rows, dtype=jnp.int32)
        token = index // plan.heads
        head_in_group = unit % plan.chunks * plan.heads + index % plan.heads
        head = kv_head * plan.group + head_in_group
        live = (token < tokens) & (token < plan.tokens) & (head_in_group < plan.group)
        lane = jnp.arange(pl.next_power_of_2(plan.head_dim), dtype=jnp.int32)
        in_head = lane < plan.head_dim
        place = ((first_row + token)[:, None], head[:, None], lane[None, :])
        stored = live[:, None] & in_head[None, :]
        q = plt.load(q_ref.at[place], mask=stored, other=0.0).astype(plan.compute_dtype)
        # A row without a token sees no key: its position lies before the first.
        position = jnp.where(live, first_position + token, -1)
        factor = factor_ref[kv_head]
        nothing = jnp.zeros((), k_ref.dtype)

        lowest, end, first, whole_from, whole_to, last = tile_bounds(
            first_position, tokens, split, keys=keys, splits=plan.splits, window=plan.window
        )

        def step(tile_index, state, masked):
            accumulator, peak, denominator = state
            key = tile_index * keys + jnp.arange(keys, dtype=jnp.int32)
            inside = (key < end) & (key >= lowest)
            block = plt.load(
                table_ref.at[request, jnp.where(inside, key // plan.block_size, 0)],
                mask=inside,
                other=0,
            )
            at = (block[:, None], kv_head, (key % plan.block_size)[:, None], lane[None, :])
            loaded = inside[:, None] & in_head[None, :]
            k = plt.load(k_ref.at[at], mask=loaded, other=nothing).astype(plan.compute_dtype)
            v = plt.load(v_ref.at[at], mask=loaded, other=nothing).astype(plan.compute_dtype)
            logits = _dot(q, k, ((1,), (1,))) * factor
            if plan.soft_cap is not None:
                logits = plan.soft_cap * jnp.tanh(logits * (1 / plan.soft_cap))
            logits = logits * math.log2(math.e)
            if masked:
                visible = _visible(key, position, plan)
                logits = jnp.where(visible, logits, MASKED)
            new_peak = jnp.maximum(peak, logits.max(axis=1))
            weights = jnp.exp2(logits - new_peak[:, None])
            shrink = jnp.exp2(peak - new_peak)
            accumulator = accumulator * shrink[:, None] + _dot(
                weights.astype(plan.compute_dtype), v, ((1,), (0,))
            )
            return accumulator, new_peak, denominator * shrink + weights.sum(axis=1)

        state = (
            jnp.zeros((rows, lane.shape[0]), jnp.float32),
            jnp.full((rows,), LEAST_PEAK, jnp.float32),
            jnp.zeros((rows,), jnp.float32),
        )
        masked = functools.partial(step, masked=True)
        if plan.tokens == 1:
            # One token leaves nothing to gain from telling whole tiles apart: decode waits for
            # memory.
            state = lax.fori_loop(first, last, masked, state)
        else:
            state = lax.fori_loop(first, whole_from, masked, state)
            state = lax.fori_loop(
                whole_from, whole_to, functools.partial(step, masked=False), state
            )
            state = lax.fori_loop(whole_to, last, masked, state)
        accumulator, peak, denominator = state
        empty = denominator == 0
        safe = jnp.where(empty, 1.0, denominator)
        out = (accumulator / safe[:, None]).astype(plan.out_dtype)
        plt.store(out_ref.at[(split, *place)], out, mask=stored)
        lse = jnp.where(empty, -jnp.inf, (peak + jnp.log2(safe)) * math.log(2))
        plt.store(lse_ref.at[split, first_row + token, head], lse, mask=live)


def _visible(key, position, plan: Plan):
    """bool[rows, keys]: which keys i32[keys] each row at position i32[rows] sees."""
    visible = key[None, :] <= position[:, None]
    if plan.window is not None:
        visible &= key[None, :] > position[:, None] - plan.window
    return visible


def _dot(a, b, contracting):
    """A matrix product in f32; full f32, not tf32, where the operands are f32."""
    return lax.dot_general(
        a,
        b,
        (contracting, ((), ())),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
