"""The three programs of a step as functions to be compiled: forward, logits, sample."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxllm.execution.batch import BatchLayout, SamplingFields, split_sampling
from jaxllm.execution.logprobs import all_logprobs, processed_logits, token_logprobs
from jaxllm.execution.mesh import TENSOR_AXIS, HeadLayout
from jaxllm.execution.parameters import FunctionalModel, Params
from jaxllm.execution.sampler import sample
from jaxllm.models.layers import take_rows
from pallas_kernels.paged_attention.api import attend_and_write
from pallas_kernels.paged_attention.pool import pool_spec

type Pools = list[jax.Array]


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How the layers attend.

    Attributes:
      impl: name of a paged attention implementation.
      heads: KV heads in the pool, and how often those of the model are repeated.
      kv_dtype: dtype of the numbers in the pool.
    """

    impl: str
    heads: HeadLayout
    kv_dtype: Any
    mesh: Mesh


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class LayerCache:
    """What a layer's attention reads and writes: its pools [P, K, B, D], and the step's batch."""

    k_pool: jax.Array
    v_pool: jax.Array
    block_tables: jax.Array
    context_lens: jax.Array
    query_starts: jax.Array
    write_slots: jax.Array


@dataclasses.dataclass(frozen=True, slots=True)
class PagedAttend:
    """The `attend` the engine gives a model: writes K/V to the pool and attends over it.

    Attributes:
      decode: every request of the step has one token at most.
    """

    plan: AttentionPlan
    decode: bool

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerCache, window: int | None
    ) -> tuple[jax.Array, LayerCache]:
        """q [T, H, D], k and v [T, K, D] -> [T, H, D] and the cache with new pools."""
        plan = self.plan
        if plan.heads.kv_repeat > 1:
            k, v = (jnp.repeat(x, plan.heads.kv_repeat, axis=1) for x in (k, v))

        def run(q, k, v, k_pool, v_pool, tables, lens, starts, slots):
            return attend_and_write(
                q, k, v, k_pool, v_pool, tables, lens, starts, slots,
                scale=q.shape[-1] ** -0.5, window=window, decode=self.decode,
                kv_dtype=plan.kv_dtype, impl=plan.impl,
            )  # fmt: skip

        if plan.mesh.size > 1:
            heads = PartitionSpec(None, TENSOR_AXIS, None)
            pool, whole = pool_spec(TENSOR_AXIS), PartitionSpec()
            run = jax.shard_map(
                run,
                mesh=plan.mesh,
                in_specs=(heads, heads, heads, pool, pool, whole, whole, whole, whole),
                out_specs=(heads, pool, pool),
                check_vma=False,
            )
        out, k_pool, v_pool = run(
            q, k, v, cache.k_pool, cache.v_pool,
            cache.block_tables, cache.context_lens, cache.query_starts, cache.write_slots,
        )  # fmt: skip
        return out, dataclasses.replace(cache, k_pool=k_pool, v_pool=v_pool)


def forward(
    model: FunctionalModel,
    plan: AttentionPlan,
    layout: BatchLayout,
    decode: bool,
    params: Params,
    k_pools: Pools,
    v_pools: Pools,
    last_tokens: jax.Array,
    packed: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, Pools, Pools]:
    """Runs the step's tokens through the layers.

    Returns the hidden states that the batch keeps [T, hidden], those of the sampling rows
    [S, hidden], zeros behind them, the sampling part of the buffer, and the updated pools.
    """
    batch = layout.split(packed)
    sampling = packed[: layout.sampling_size]
    ids = batch.token_ids
    from_slots = last_tokens[jnp.maximum(-1 - ids, 0)]
    ids = jnp.where(ids < 0, from_slots, ids)
    caches = [
        LayerCache(
            k_pool,
            v_pool,
            batch.block_tables,
            batch.context_lens,
            batch.query_starts,
            batch.write_slots,
        )
        for k_pool, v_pool in zip(k_pools, v_pools, strict=True)
    ]
    module = model.bind(params)
    attend = PagedAttend(plan, decode)
    hidden, caches = module.hidden(ids, batch.positions, attend, caches, batch.kept)
    rows = split_sampling(sampling, layout.max_num_seqs).rows
    k_pools, v_pools = [cache.k_pool for cache in caches], [cache.v_pool for cache in caches]
    return hidden, take_rows(hidden, rows), sampling, k_pools, v_pools


def head_logits(
    model: FunctionalModel, num_rows: int, head_params: Params, hidden: jax.Array
) -> jax.Array:
    """Logits float32 [num_rows, V] of the first rows of hidden [S, hidden]."""
    return model.bind_head(head_params).logits(hidden[:num_rows])


def sample_rows(
    num_rows: int,
    max_num_seqs: int,
    need: int,
    logits: jax.Array,
    sampling: jax.Array,
    last_tokens: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draws a token per row and stores it in its slot: ids int32 [num_rows], the floors of the
    draws float32 [num_rows], last_tokens."""
    all_rows = split_sampling(sampling, max_num_seqs)
    fields = SamplingFields(
        *(getattr(all_rows, f.name)[:num_rows] for f in dataclasses.fields(SamplingFields))
    )
    token_ids, floors = sample(logits, fields, need)
    return token_ids, floors, last_tokens.at[fields.slots].set(token_ids)


def sampled_logprobs(
    num_top: int | None,
    processed: bool,
    max_num_seqs: int,
    logits: jax.Array,
    token_ids: jax.Array,
    floors: jax.Array,
    sampling: jax.Array,
) -> tuple[jax.Array, ...]:
    """Log probabilities of the sampled tokens [R] under logits [R, V].

    Args:
      num_top: how many of the most probable tokens to return; None returns the whole vocabulary.
      processed: of the distribution that was sampled from, not of the logits as they are.
    """
    if processed:
        bits = split_sampling(sampling, max_num_seqs).temperature[: logits.shape[0]]
        temperature = jax.lax.bitcast_convert_type(bits, jnp.float32)
        logits = processed_logits(logits, temperature, floors)
    logprobs, ranks, values, ids = token_logprobs(num_top or 1, logits, token_ids)
    if num_top is None:
        return logprobs, ranks, all_logprobs(logits)
    return logprobs, ranks, values, ids
