"""The whole compile for an H200, without one: no spills, shared memory within limits, in place,
tensor-parallel.
"""

import dataclasses
import functools
import importlib.util
import os

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from pallas_kernels.paged_attention import attend_and_write, mosaic, pool_spec, triton, tuning
from pallas_kernels.testing.aot import SHARED_MEMORY_LIMIT, Kernel, compile_for_h200, mesh
from pallas_kernels.testing.grid import GridCase
from pallas_kernels.testing.variants import compile_variant, operands, variants

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
    # A continuous build must have the extra; elsewhere these need not run.
    pytest.mark.skipif(
        importlib.util.find_spec("jax_plugins.xla_cuda13") is None and not os.environ.get("CI"),
        reason="needs the extra kernels-aot",
    ),
]

IMPLEMENTATIONS = {"mosaic": mosaic.attend, "triton": triton.attend}


@pytest.mark.parametrize("variant", variants(), ids=str)
def test_no_spills_and_within_shared_memory(variant):
    for phase, kernel in compile_variant(variant).items():
        assert kernel.spills == 0, f"{variant} {phase}: {kernel.spills} bytes"
        assert 0 < kernel.shared_memory <= SHARED_MEMORY_LIMIT
        assert kernel.blocks_per_sm >= 1
        if variant.implementation == "mosaic":
            assert "wgmma" in kernel.ptx and "cp.async.bulk.tensor" in kernel.ptx


@pytest.mark.parametrize("attend", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_every_option_at_once(attend):
    case = GridCase(
        queries=[40, 1], contexts=[90, 70], heads=(16, 2), head_dim=128, block_size=8,
        window=64, soft_cap=30.0, sinks=True, kv_dtype="float8_e5m2", scales=True, table_width=256,
    )  # fmt: skip
    call = functools.partial(
        attend, **case.options(), return_lse=True, kv_dtype=jnp.dtype(case.kv_dtype)
    )
    _, kernels = compile_for_h200(call, *case.batch().operands())
    ours = [k for k in kernels if k.name.startswith("paged_attention")]
    assert len(ours) == 2
    assert all(k.spills == 0 and k.shared_memory <= SHARED_MEMORY_LIMIT for k in ours)


def test_a_spill_is_seen(monkeypatch):
    tile = tuning.TritonTile(16, 64, warps=1, stages=1)
    monkeypatch.setattr(tuning, "triton_tile", lambda *a: tile)
    call = functools.partial(triton.attend, scale=0.1, decode=True, kv_dtype=jnp.dtype("bfloat16"))
    arguments = operands(128, "bfloat16", tokens=4, requests=4)
    _, kernels = compile_for_h200(call, *arguments)
    assert next(k for k in kernels if k.name == "paged_attention_decode").spills > 0


@pytest.mark.parametrize(("name", "devices"), [("mosaic", 2), ("mosaic", 8), ("triton", 4)])
def test_tensor_parallel(name, devices):
    """The cache write and attention of one layer inside shard_map, pools donated, output summed
    over devices.
    """
    tokens = requests = 64
    q, k_pool, v_pool, *tables = operands(128, "bfloat16", tokens=tokens, requests=requests)
    rows = jax.ShapeDtypeStruct((tokens, *k_pool.shape[1::2]), q.dtype)
    weight = jax.ShapeDtypeStruct((q.shape[1] * 128, 256), q.dtype)
    slots = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    heads, whole = PartitionSpec(None, "tensor", None), PartitionSpec()
    specs = (heads, heads, heads, pool_spec(), pool_spec(), whole, whole, whole, whole,
             PartitionSpec("tensor", None))  # fmt: skip

    def layer(*arguments):
        *call, weight = arguments
        out, k_pool, v_pool = attend_and_write(*call, scale=0.1, decode=True, impl=name)
        projected = out.reshape(tokens, -1) @ weight
        return jax.lax.psum(projected, "tensor"), k_pool, v_pool

    sharded = jax.shard_map(
        layer,
        mesh=mesh(devices),
        in_specs=specs,
        out_specs=(whole, pool_spec(), pool_spec()),
        check_vma=False,
    )
    compiled, kernels = compile_for_h200(
        sharded,
        *(q, rows, rows, k_pool, v_pool, *tables, slots, weight),
        devices=devices,
        specs=specs,
        donate_argnums=(3, 4),
    )
    ours = [k for k in kernels if k.name.startswith("paged_attention")]
    assert ours and all(k.spills == 0 for k in ours)
    pool_bytes = k_pool.size * k_pool.dtype.itemsize // devices
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 2 * pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 2
    assert "all-reduce" in compiled.as_text()


def test_occupancy_counts_what_runs_out_first():
    kernel = Kernel("k", 128, 0, 0, 16384, 256, "")
    assert (kernel.blocks_per_sm, kernel.occupancy) == (2, 0.25)
    assert dataclasses.replace(kernel, shared_memory=200_000).blocks_per_sm == 1
    assert dataclasses.replace(kernel, registers=32, shared_memory=0).blocks_per_sm == 8
