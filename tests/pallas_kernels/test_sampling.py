"""Two-stage choices against the one-stage ones of JAX and against exact probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.sampling import inverse_cdf_draw, two_stage_argmax, two_stage_top_k

WIDTHS = [1, 127, 129, 4096, 5000]
argmax = jax.jit(two_stage_argmax)
draw = jax.jit(inverse_cdf_draw)


def rows(width: int, kind: str) -> np.ndarray:
    rng = np.random.default_rng(width)
    match kind:
        case "normal":
            x = rng.standard_normal((6, width)) * 3
        case "ties":
            x = rng.integers(0, 3, (6, width))
        case "equal":
            x = np.full((6, width), -2.5)
        case "masked":
            x = np.where(rng.random((6, width)) < 0.99, -np.inf, rng.standard_normal((6, width)))
            x[0] = -np.inf
            x[1, width - 1] = 5.0
        case _:
            raise ValueError(kind)
    return x.astype(np.float32)


@pytest.mark.parametrize("width", WIDTHS)
def test_argmax_is_that_of_numpy(width: int) -> None:
    for kind in ("normal", "ties", "equal", "masked"):
        x = rows(width, kind)
        np.testing.assert_array_equal(argmax(x), x.argmax(-1), err_msg=kind)
    assert argmax(x).dtype == jnp.int32


@pytest.mark.parametrize(
    ("width", "k"), [(1, 1), (129, 1), (700, 4), (4096, 20), (5000, 3), (5000, 39), (5000, 40)]
)
def test_top_k_is_that_of_lax(width: int, k: int) -> None:
    two_stage = jax.jit(two_stage_top_k, static_argnums=1)
    for kind in ("normal", "ties", "equal", "masked"):
        x = rows(width, kind)
        values, places = two_stage(x, k)
        expected_values, expected_places = lax.top_k(x, k)
        np.testing.assert_array_equal(values, expected_values, err_msg=kind)
        np.testing.assert_array_equal(places, expected_places, err_msg=kind)
        assert places.dtype == jnp.int32


@pytest.mark.parametrize("width", WIDTHS)
def test_draw_inverts_the_distribution(width: int) -> None:
    """Each draw is where float64's running sum passes the uniform, up to f32 rounding."""
    rng = np.random.default_rng(width)
    for kind in ("normal", "ties", "equal", "masked"):
        x = rows(width, kind)
        if kind == "masked":
            x = x[1:]
            x = x[np.isfinite(x).any(-1)]
        for u in (0.0, 1 - 2**-24, *rng.random(5)):
            uniform = np.full(len(x), u, np.float32)
            got = np.asarray(draw(x, uniform))
            p = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            upper = np.take_along_axis(p.cumsum(-1), got[:, None], -1)[:, 0]
            mass = np.take_along_axis(p, got[:, None], -1)[:, 0]
            assert (mass > 0).all(), kind
            assert (uniform <= upper + 2e-6).all(), kind
            assert (uniform >= upper - mass - 2e-6).all(), kind


def test_draw_of_rows_without_a_finite_logit_is_zero() -> None:
    x = np.full((2, 300), -np.inf, np.float32)
    np.testing.assert_array_equal(draw(x, np.array([0.0, 0.9], np.float32)), [0, 0])


def test_draws_have_the_frequencies_of_softmax() -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(500) * 2).astype(np.float32)
    x[100:300] = -np.inf
    count = 100_000
    # Evenly spread uniforms: a frequency is off by one place at each end at most.
    uniform = ((np.arange(count) + 0.5) / count).astype(np.float32)
    one = jax.jit(
        lambda u: lax.map(lambda v: inverse_cdf_draw(x[None], v[None])[0], u, batch_size=500)
    )
    counts = np.bincount(np.asarray(one(uniform)), minlength=500)
    p = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(counts / count, p / p.sum(), rtol=0, atol=3e-5)


def test_rows_are_drawn_alone() -> None:
    """A row's draw does not depend on the rows beside it."""
    x = rows(1000, "normal")
    uniform = np.linspace(0, 0.99, 6, dtype=np.float32)
    together = np.asarray(draw(x, uniform))
    alone = [int(draw(x[i : i + 1], uniform[i : i + 1])[0]) for i in range(6)]
    assert together.tolist() == alone


def test_narrow_logits() -> None:
    x = jnp.asarray(rows(700, "normal")).astype(jnp.bfloat16)
    np.testing.assert_array_equal(argmax(x), jnp.argmax(x, -1))
    np.testing.assert_array_equal(two_stage_top_k(x, 5)[1], lax.top_k(x, 5)[1])
    uniform = np.full(6, 0.4, np.float32)
    np.testing.assert_array_equal(draw(x, uniform), draw(x.astype(jnp.float32), uniform))
