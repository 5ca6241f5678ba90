"""The sampler against a numpy oracle, and against its own meaning."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.execution.batch import GREEDY, RANDOM, TRUNCATED, SamplingFields
from jaxllm.execution.sampler import NUM_CANDIDATES, sample
from pallas_kernels import cpu_library


def fields(rows: int, uniform, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> SamplingFields:
    def bits(value):
        full = np.broadcast_to(np.asarray(value, np.float32), rows)
        return jnp.asarray(np.ascontiguousarray(full).view(np.int32))

    zeros = jnp.zeros(rows, jnp.int32)
    return SamplingFields(
        rows=zeros,
        slots=zeros,
        uniform=bits(uniform),
        temperature=bits(temperature),
        top_k=jnp.broadcast_to(jnp.asarray(top_k, jnp.int32), rows),
        top_p=bits(top_p),
        min_p=bits(min_p),
    )


@functools.cache
def sampler(need: int):
    def run(logits, *columns):
        return sample(logits, SamplingFields(*columns), need)[0]

    return jax.jit(run)


def draw(logits, need, **options) -> np.ndarray:
    f = fields(len(logits), **options)
    columns = [getattr(f, name) for name in SamplingFields.__slots__]
    return np.asarray(sampler(need)(jnp.asarray(logits, jnp.float32), *columns))


def kept(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> set[int]:
    """The ids a draw may give, by the definitions, in float64."""
    scaled = np.asarray(logits, np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    alive = np.ones(len(p), bool)
    if min_p:
        alive &= p >= min_p * p.max()
    if top_k:
        alive &= p >= np.sort(p)[::-1][min(top_k, len(p)) - 1]
    q = np.where(alive, p, 0)
    order = np.argsort(-q, kind="stable")
    before = np.cumsum(q[order]) - q[order]
    return {int(i) for i, b in zip(order, before, strict=True) if b < top_p * q.sum() and alive[i]}


RNG = np.random.default_rng(1)
CASES = [
    {"top_k": 5},
    {"top_k": 1},
    {"top_k": NUM_CANDIDATES + 50},
    {"top_p": 0.5},
    {"top_p": 0.95, "temperature": 1.7},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.7, "min_p": 0.02, "temperature": 0.6},
    {"top_p": 0.999, "temperature": 2.0},
]


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("width", [37, 1000])
def test_draws_stay_inside_what_is_kept_and_reach_all_of_it(options, width):
    logits = RNG.normal(size=width) * 3
    expected = kept(logits, **options)
    rows = 512
    ids = draw(
        np.tile(logits, (rows, 1)), TRUNCATED, uniform=(np.arange(rows) + 0.5) / rows, **options
    )
    seen = set(ids.tolist())
    assert seen <= expected
    weights = np.exp(logits / options.get("temperature", 1.0))
    mass = sum(weights[i] for i in expected)
    # Evenly spaced uniforms reach every id whose share is above the spacing.
    assert {i for i in expected if weights[i] / mass > 2 / rows} <= seen


@pytest.mark.parametrize("need", [RANDOM, TRUNCATED])
def test_frequencies_follow_the_distribution(need):
    logits = RNG.normal(size=50)
    rows = 8192
    ids = draw(
        np.tile(logits, (rows, 1)), need, uniform=(np.arange(rows) + 0.5) / rows, temperature=0.8
    )
    p = np.exp(logits / 0.8)
    p /= p.sum()
    np.testing.assert_allclose(np.bincount(ids, minlength=50) / rows, p, atol=2 / rows)


def test_greedy_takes_the_first_of_equals():
    logits = np.zeros((3, 300), np.float32)
    logits[1, [7, 250]] = 2
    logits[2, 299] = 1
    assert draw(logits, GREEDY, uniform=0.5).tolist() == [0, 7, 299]


def test_greedy_rows_in_a_random_batch_are_greedy():
    logits = RNG.normal(size=(4, 200))
    temperature = np.array([0.0, 1.0, 0.0, 0.5])
    for need in (RANDOM, TRUNCATED):
        ids = draw(logits, need, uniform=0.999, temperature=temperature)
        assert ids[[0, 2]].tolist() == logits.argmax(-1)[[0, 2]].tolist()


def test_a_row_gets_what_it_gets_alone():
    """Also where other rows force the path over the whole vocabulary."""
    flat, peaked = np.zeros(1000), RNG.normal(size=1000) * 8
    options = {"top_p": 0.9, "uniform": 0.37, "temperature": 1.0}
    alone = [draw(row[None], TRUNCATED, **options)[0] for row in (flat, peaked)]
    together = draw(np.stack([flat, peaked, flat]), TRUNCATED, **options)
    assert together.tolist() == [alone[0], alone[1], alone[0]]


def test_an_untruncated_row_draws_the_same_in_either_program():
    logits = RNG.normal(size=(64, 700)) * 2
    noise = RNG.random(64)
    options = {"temperature": 0.9}
    mixed = draw(
        np.concatenate([logits, logits]),
        TRUNCATED,
        uniform=np.concatenate([noise, noise]),
        top_p=np.concatenate([np.ones(64), np.full(64, 0.5)]),
        **options,
    )
    assert mixed[:64].tolist() == draw(logits, RANDOM, uniform=noise, **options).tolist()


def test_small_temperatures_and_large_logits_stay_finite():
    logits = np.array([[1e4, -1e4, 9.99e3, 0.0]])
    for need in (RANDOM, TRUNCATED):
        assert draw(logits, need, uniform=0.99, temperature=0.01).tolist() == [0]


def test_other_platforms_draw_the_same(monkeypatch):
    """What is compiled for GPUs searches all rows at once, with the compiler's own sums."""
    rows = 48
    logits = RNG.normal(size=(rows, 1500)) * 2
    options = {
        "uniform": RNG.random(rows),
        "temperature": np.array([0.0, 0.7, 1.3])[np.arange(rows) % 3],
        "top_k": np.array([0, 400, 20, 0])[np.arange(rows) % 4],
        "top_p": np.array([1.0, 0.97, 0.9, 1.0, 0.6])[np.arange(rows) % 5],
        "min_p": np.array([0.0, 0.0, 0.01])[np.arange(rows) // 3 % 3],
    }
    by_cpu = draw(logits, TRUNCATED, **options)
    monkeypatch.setattr(cpu_library, "compiling_for_cpu", lambda: False)
    sampler.cache_clear()
    by_others = draw(logits, TRUNCATED, **options)
    sampler.cache_clear()
    assert by_cpu.tolist() == by_others.tolist()
