"""The three programs of a step as functions to be compiled: forward, logits, sample."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxllm.execution.batch import BatchFields, BatchLayout, SamplingFields, split_sampling
from jaxllm.execution.mesh import TENSOR_AXIS, HeadLayout
from jaxllm.execution.parameters import FunctionalModel, Params
from jaxllm.execution.sampler import sample
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


class PagedCache:
    """The `attend` of a model during one trace: writes K/V to the pools and attends over them."""

    def __init__(
        self, plan: AttentionPlan, k_pools: Pools, v_pools: Pools, batch: BatchFields, decode: bool
    ):
        self.plan = plan
        self.k_pools = list(k_pools)
        self.v_pools = list(v_pools)
        self.batch = batch
        self.decode = decode

    def attend(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, window: int | None
    ) -> jax.Array:
        """q [T, H, D], k and v [T, K, D] -> [T, H, D]."""
        plan, batch = self.plan, self.batch
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
        out, self.k_pools[layer], self.v_pools[layer] = run(
            q, k, v, self.k_pools[layer], self.v_pools[layer],
            batch.block_tables, batch.context_lens, batch.query_starts, batch.write_slots,
        )  # fmt: skip
        return out


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
) -> tuple[jax.Array, jax.Array, Pools, Pools]:
    """Runs the step's tokens through the layers.

    Returns the hidden states of the sampling rows [S, hidden], the sampling part of the buffer,
    and the updated pools.
    """
    batch = layout.split(packed)
    sampling = packed[: layout.sampling_size]
    ids = batch.token_ids
    from_slots = last_tokens[jnp.maximum(-1 - ids, 0)]
    ids = jnp.where(ids < 0, from_slots, ids)
    cache = PagedCache(plan, k_pools, v_pools, batch, decode)
    hidden = model.bind(params).hidden(ids, batch.positions, cache.attend)
    rows = split_sampling(sampling, layout.max_num_seqs).rows
    return hidden[rows], sampling, cache.k_pools, cache.v_pools


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
) -> tuple[jax.Array, jax.Array]:
    """Draws a token per row and stores it in its slot: ids int32 [num_rows], last_tokens."""
    all_rows = split_sampling(sampling, max_num_seqs)
    fields = SamplingFields(
        *(getattr(all_rows, f.name)[:num_rows] for f in dataclasses.fields(SamplingFields))
    )
    token_ids = sample(logits, fields, need)
    return token_ids, last_tokens.at[fields.slots].set(token_ids)
