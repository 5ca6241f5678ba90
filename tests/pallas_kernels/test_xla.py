"""What XLA makes of the plain implementation, and what must not change its results. (test_grid.py:
the numbers.)
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.paged_attention import (
    allocate_pool,
    attend_and_write,
    oracle,
    paged_attention,
    pool_spec,
    write_kv,
)
from pallas_kernels.testing.batches import make_batch


def run_xla(batch, **options):
    return np.asarray(paged_attention(*batch.operands(), scale=0.125, impl="xla", **options))


def test_decode_promise_changes_nothing():
    batch = make_batch([1, 1, 1, 0], [40, 129, 300, 0], tokens=4)
    np.testing.assert_array_equal(run_xla(batch, decode=True), run_xla(batch))


@pytest.mark.parametrize("window", [None, 24])
def test_a_row_does_not_depend_on_its_batch(window):
    alone = make_batch([1, 0, 0, 0], [150, 0, 0, 0], tokens=4, table_width=40)
    several = make_batch([1, 1, 0, 0], [150, 600, 0, 0], tokens=4, table_width=40)
    tables = np.concatenate([alone.block_tables[:1], several.block_tables[1:]])
    k_pool = np.concatenate([alone.k_pool, several.k_pool])
    v_pool = np.concatenate([alone.v_pool, several.v_pool])
    tables[1:] += alone.k_pool.shape[0]
    operands = alone.q, k_pool, v_pool, tables, several.context_lens, several.query_starts
    together = paged_attention(*map(jnp.asarray, operands), scale=0.125, window=window, impl="xla")
    np.testing.assert_array_equal(run_xla(alone, window=window)[0], together[0])


def test_chunking_does_not_change_a_sequence():
    whole = make_batch([70], [70], seed=2)
    attend = jax.jit(functools.partial(paged_attention, scale=0.125, impl="xla"))
    expected = attend(*whole.operands())
    _, *pools_and_table, _, _ = whole.operands()
    for chunk in (1, 9, 64):
        rows = []
        for start in range(0, 70, chunk):
            end = min(start + chunk, 70)
            q = np.zeros_like(whole.q)
            q[: end - start] = whole.q[start:end]
            ends = jnp.array([end], jnp.int32), jnp.array([0, end - start], jnp.int32)
            rows.append(attend(jnp.asarray(q), *pools_and_table, *ends)[: end - start])
        np.testing.assert_allclose(np.concatenate(rows), expected, atol=2e-6)


def test_shared_blocks():
    batch = make_batch([3, 1, 2], [40, 50, 70], shared_blocks=2)
    np.testing.assert_allclose(run_xla(batch), batch.expected(scale=0.125)[0], atol=2e-5)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32", "int8", "float8_e4m3fn"])
def test_write_and_attend_is_in_place(kv_dtype):
    T, K, D, B, P, R = 8, 2, 64, 16, 2048, 4
    pools = allocate_pool(P, K, B, D, kv_dtype)
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in [
            ((T, 4, D), jnp.float32), ((T, K, D), jnp.float32), ((T, K, D), jnp.float32),
            *[(p.shape, p.dtype) for p in pools],
            ((R, 64), jnp.int32), ((R,), jnp.int32), ((R + 1,), jnp.int32), ((T,), jnp.int32),
        ]
    ]  # fmt: skip
    step = functools.partial(attend_and_write, scale=0.125, impl="xla", kv_dtype=kv_dtype)
    compiled = jax.jit(step, donate_argnums=(3, 4)).lower(*shapes).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == sum(p.nbytes for p in pools)
    assert memory.temp_size_in_bytes < pools[0].nbytes / 2


def test_write_matches_the_oracle_and_keeps_every_other_slot():
    rng = np.random.default_rng(0)
    k_pool, v_pool = rng.standard_normal((2, 6, 2, 8, 16)).astype(np.float32)
    k, v = rng.standard_normal((2, 5, 2, 16)).astype(np.float32)
    slots = np.array([9, 46, 0, 47, 24], np.int32)
    new_k, new_v = write_kv(*map(jnp.asarray, (k, v, k_pool, v_pool, slots)))
    np.testing.assert_array_equal(np.asarray(new_k)[1:], oracle.write_kv(k, k_pool, slots, 8)[1:])
    np.testing.assert_array_equal(np.asarray(new_v)[1:], oracle.write_kv(v, v_pool, slots, 8)[1:])


def test_a_slot_outside_the_pool_is_dropped():
    pool = jnp.zeros((2, 1, 8, 16))
    rows = jnp.ones((2, 1, 16))
    new_k, _ = write_kv(rows, rows, pool, pool, jnp.array([16, -1], jnp.int32))
    assert not np.asarray(new_k).any()


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_scaled_write_reads_back_what_was_written(kv_dtype):
    k = np.random.default_rng(0).uniform(-6, 6, (3, 2, 64)).astype(np.float32)
    k[0, 0, :2] = 1e4, -1e4
    scale = jnp.array([0.05, 0.1], jnp.float32)
    pools = allocate_pool(3, 2, 8, 64, kv_dtype)
    slots = jnp.array([8, 9, 10], jnp.int32)
    k_pool, _ = write_kv(k, k, *pools, slots, k_scale=scale, v_scale=scale, kv_dtype=kv_dtype)
    numbers = np.asarray(k_pool)[1, :, :3].view(jnp.dtype(kv_dtype)).astype(np.float32)
    back = numbers.transpose(1, 0, 2) * np.asarray(scale)[:, None]
    limits = {"int8": (-6.4, 6.35), "float8_e4m3fn": (-22.4, 22.4)}[kv_dtype]
    np.testing.assert_allclose(back, np.clip(k, *limits), atol=0.06, rtol=0.07)


@pytest.mark.parametrize("check_vma", [True, False])
def test_sharded_over_kv_heads(check_vma):
    batch = make_batch([5, 1, 1], [20, 33, 7], heads=(8, 4))
    mesh = jax.make_mesh((4,), ("tensor",), devices=jax.devices()[:4])
    heads, pools, whole = PartitionSpec(None, "tensor", None), pool_spec(), PartitionSpec()
    attend = functools.partial(paged_attention, scale=0.125, impl="xla")
    sharded = jax.jit(
        jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=(heads, pools, pools, whole, whole, whole),
            out_specs=heads,
            check_vma=check_vma,
        )
    )
    operands = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(
            batch.operands(), (heads, pools, pools, whole, whole, whole), strict=True
        )
    ]
    np.testing.assert_allclose(sharded(*operands), run_xla(batch), atol=1e-6)
