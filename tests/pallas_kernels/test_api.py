"""What the front door refuses, and what it chooses."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import (
    ContractError,
    UnsupportedError,
    allocate_pool,
    attend_and_write,
    available_implementations,
    paged_attention,
    pool_dtype,
    register_implementation,
    registry,
    select_impl,
)
from pallas_kernels.paged_attention.contract import check_call
from pallas_kernels.testing.batches import make_batch

BATCH = make_batch([2, 1], [5, 9])


def call(**changes):
    names = ("q", "k_pool", "v_pool", "block_tables", "context_lens", "query_starts")
    operands = dict(zip(names, BATCH.operands(), strict=True))
    options = {"scale": 0.125, "impl": "xla"}
    for name, value in changes.items():
        (operands if name in operands else options)[name] = value
    return paged_attention(**operands, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": jnp.zeros((3, 4))}, r"must be \[T, H, D\]"),
        ({"q": jnp.zeros((3, 4, 128))}, "head_dim of q is 128"),
        ({"q": jnp.zeros((3, 3, 64))}, "3 query heads"),
        ({"q": jnp.zeros((3, 4, 64), jnp.int32)}, "query dtype int32"),
        ({"v_pool": jnp.zeros((1, 2, 16, 64))}, "pools differ"),
        ({"context_lens": jnp.zeros((3,), jnp.int32)}, "context_lens"),
        ({"context_lens": jnp.zeros((2,), jnp.float32)}, "must be int32"),
        ({"block_tables": jnp.zeros((2,), jnp.int32)}, "block_tables"),
        ({"decode": True}, "T = 3 and R = 2"),
        ({"scale": 0.0}, "scale"),
        ({"window": 0}, "window"),
        ({"soft_cap": -1.0}, "soft_cap"),
        ({"sinks": jnp.zeros(3)}, "sinks"),
        ({"k_scale": jnp.zeros(4)}, "k_scale"),
        ({"kv_dtype": "bfloat16"}, "cannot hold bfloat16"),
        ({"kv_dtype": "complex64"}, "complex64"),
    ],
)
def test_contradictions_are_named(changes, message):
    with pytest.raises(ContractError, match=message):
        call(**changes)


def test_bits_need_their_type():
    pool = jnp.zeros(BATCH.k_pool.shape, jnp.uint16)
    with pytest.raises(ContractError, match="holds bits"):
        call(k_pool=pool, v_pool=pool)


def test_rows_to_write_must_match():
    rows = jnp.zeros((3, 2, 64))
    q, *rest = BATCH.operands()
    with pytest.raises(ContractError, match="slots"):
        attend_and_write(q, rows, rows, *rest, jnp.zeros(2, jnp.int32), scale=0.125)


def test_unknown_implementation():
    with pytest.raises(UnsupportedError, match="'cuda' is not one of auto, mosaic, triton"):
        call(impl="cuda")


def test_pool_storage():
    assert pool_dtype("bfloat16", "cpu") == jnp.uint16
    assert pool_dtype("float8_e5m2", "cpu") == jnp.uint8
    assert pool_dtype("int8", "cpu") == jnp.int8
    assert pool_dtype("float32", "cpu") == jnp.float32
    assert pool_dtype("bfloat16", "gpu") == jnp.bfloat16


def test_choice_by_variable(monkeypatch, caplog):
    monkeypatch.setenv("JAXLLM_CPU_KERNELS", "xla")
    registry._say_once.cache_clear()
    with caplog.at_level(logging.INFO):
        assert select_impl(platform="cpu") == "xla"
        assert select_impl(platform="cpu") == "xla"
    assert [r.getMessage() for r in caplog.records] == ["paged attention on cpu: xla"]
    monkeypatch.setenv("JAXLLM_CPU_KERNELS", "fast")
    with pytest.raises(UnsupportedError, match="fast"):
        select_impl(platform="cpu")


def test_choice_falls_back_with_one_warning(monkeypatch, caplog):
    monkeypatch.delenv("JAXLLM_CPU_KERNELS", raising=False)
    broken = registry.Implementation("cpu", lambda *a, **k: None, unavailable=lambda: "no library")
    monkeypatch.setitem(registry._LOADERS, "cpu", lambda: broken)
    registry._say_once.cache_clear()
    with caplog.at_level(logging.INFO):
        assert select_impl(platform="cpu") == "xla"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "no library" in record.getMessage()
    monkeypatch.setenv("JAXLLM_CPU_KERNELS", "ffi")
    with pytest.raises(UnsupportedError, match="no library"):
        select_impl(platform="cpu")


def test_own_implementation(monkeypatch):
    monkeypatch.setattr(registry, "_LOADERS", dict(registry._LOADERS))

    def attend(q, *rest, **options):
        return q + options["scale"]

    register_implementation(
        "own", attend, refusal=lambda case: "no window" if case.window else None
    )
    np.testing.assert_allclose(call(impl="own"), BATCH.q + 0.125, rtol=1e-6)
    assert available_implementations()["own"] is None
    with pytest.raises(UnsupportedError, match="'own': no window"):
        call(impl="own", window=3)
    with pytest.raises(UnsupportedError, match="exists already"):
        register_implementation("own", attend)


def test_case_holds_the_static_facts():
    case = check_call(
        *BATCH.operands(), scale=1.0, window=3, soft_cap=None, sinks=None, k_scale=None,
        v_scale=1.0, return_lse=True, decode=False, kv_dtype=None,
    )  # fmt: skip
    assert (case.group, case.head_dim, case.block_size, case.window) == (2, 64, 16, 3)
    assert case.v_scale and not case.k_scale and not case.stored_as_bits


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32", "int8"])
def test_pools_are_zero_whatever_lay_there_before(kv_dtype: str) -> None:
    fill = jax.jit(lambda pool: jnp.full_like(pool, 1), donate_argnums=0)
    for num_blocks in (1, 3, 700, 700, 3):
        pools = allocate_pool(num_blocks, 3, 16, 64, kv_dtype, platform="cpu")
        for pool in pools:
            assert pool.shape == (num_blocks, 3, 16, 64)
            assert pool.dtype == pool_dtype(kv_dtype, "cpu")
            assert not np.asarray(pool).any()
        for pool in pools:
            fill(pool).delete()
