"""Whether the tests could fail: break one thing at a time, and the grid's check must notice."""

import functools

import jax.numpy as jnp
import pytest

from pallas_kernels.paged_attention import passes, triton, xla
from pallas_kernels.paged_attention.bounds import tile_bounds
from pallas_kernels.testing.grid import GridCase, check_case
from pallas_kernels.testing.interpret import triton_attend

CHUNK = GridCase(queries=[9], contexts=[40], heads=(2, 2), scales=True, window=30, sinks=True)
DECODE = GridCase(queries=[1], contexts=[150], decode=True, heads=(2, 1), splits=2)
PLAIN = GridCase(queries=[9], contexts=[40], heads=(2, 1), head_dim=64)


def seen(case: GridCase, attend) -> bool:
    """Whether check_case notices a difference."""
    try:
        check_case(case, attend)
    except AssertionError:
        return True
    return False


def renamed(**swapped):
    """xla.attend with some of its options replaced by functions of all the options."""

    def attend(*operands, **options):
        changed = {name: change(options) for name, change in swapped.items()}
        return xla.attend(*operands, **(options | changed))

    return attend


def moved(q, k_pool, v_pool, block_tables, *rest, **options):
    """xla.attend reading every block one entry further on in the table."""
    return xla.attend(q, k_pool, v_pool, jnp.roll(block_tables, -1, axis=1), *rest, **options)


def test_unbroken():
    assert not seen(CHUNK, xla.attend)
    assert not seen(DECODE, triton_attend(splits=2))


@pytest.mark.parametrize(
    "attend",
    [
        pytest.param(moved, id="shift a block"),
        pytest.param(
            renamed(k_scale=lambda o: o["v_scale"], v_scale=lambda o: o["k_scale"]),
            id="swap the scales of K and V",
        ),
        pytest.param(renamed(window=lambda o: o["window"] + 1), id="window one too long"),
        pytest.param(renamed(sinks=lambda o: None), id="drop the sinks"),
        pytest.param(renamed(scale=lambda o: o["scale"] * 1.05), id="scale off by 5 %"),
    ],
)
def test_broken_call(attend):
    assert seen(CHUNK, attend)


def test_causal_mask_dropped(monkeypatch):
    monkeypatch.setattr(
        triton, "_visible", lambda key, position, plan: jnp.ones((len(position), len(key)), bool)
    )
    assert seen(PLAIN, triton_attend())


def test_split_merge_skipped(monkeypatch):
    monkeypatch.setattr(passes, "merge_splits", lambda out, lse, sinks: (out[0], lse[0]))
    assert seen(DECODE, triton_attend(splits=2))


def test_one_key_too_many(monkeypatch):
    def longer(first_position, tokens, split, **options):
        return tile_bounds(first_position + 1, tokens, split, **options)

    monkeypatch.setattr(triton, "tile_bounds", longer)
    assert seen(DECODE, triton_attend(splits=2))


def test_last_tile_left_out(monkeypatch):
    def shorter(*arguments, **options):
        bounds = tile_bounds(*arguments, **options)
        return bounds._replace(last=jnp.maximum(bounds.last - 1, bounds.first))

    monkeypatch.setattr(triton, "tile_bounds", functools.partial(shorter))
    assert seen(DECODE, triton_attend(splits=2))
