"""The linear kernel against float64, at every instruction set of this CPU, and its XLA twin."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cpu_library
from pallas_kernels.linear import LinearError, linear, select_impl

needs_kernels = pytest.mark.skipif(
    cpu_library.unavailable() is not None, reason="the CPU kernels are not available"
)


@pytest.fixture(params=cpu_library.runnable_levels())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every instruction set this CPU can run, one after another."""
    monkeypatch.setenv(cpu_library.ISA_VARIABLE, request.param)
    return request.param


def compiled(impl: str, out: str = "float32") -> Callable[[jax.Array, jax.Array], jax.Array]:
    # A new function each time: the instruction set is read when it is traced.
    return jax.jit(functools.partial(linear, out_dtype=out, impl=impl))


def operands(m: int, n: int, k: int, x_dtype: str, w_dtype: str) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(m * 1000003 + n * 1009 + k)
    x = jnp.asarray(rng.standard_normal((m, k), np.float32)).astype(x_dtype)
    return x, jnp.asarray(rng.standard_normal((n, k), np.float32)).astype(w_dtype)


def exact(x: jax.Array | np.ndarray, w: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float64) @ np.asarray(w, np.float64).T


def scaled_error(got: jax.Array, x: jax.Array | np.ndarray, w: jax.Array) -> float:
    """Largest error in units of the sum of the magnitudes that were added."""
    size = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(w, np.float64)).T
    return float((np.abs(np.asarray(got, np.float64) - exact(x, w)) / (size + 1e-30)).max())


SHAPES = [
    (1, 1, 1), (1, 37, 64), (1, 64, 100), (2, 16, 15), (3, 5, 33), (4, 18, 576), (6, 33, 48),
    (7, 30, 31), (13, 64, 96), (48, 19, 130), (49, 17, 1536), (97, 35, 2100),
]  # fmt: skip


@needs_kernels
@pytest.mark.parametrize("w_dtype", ["float32", "bfloat16", "float16"])
def test_matches_float64_in_f32(isa: str, w_dtype: str) -> None:
    for m, n, k in SHAPES:
        x, w = operands(m, n, k, "float32", w_dtype)
        rounded = isa == "avx512bf16" and w_dtype == "bfloat16"
        got = compiled("ffi")(x, w)
        assert got.shape == (m, n)
        assert scaled_error(got, x, w) < (4e-3 if rounded else 3e-7), (m, n, k)


@needs_kernels
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("out", ["float32", "bfloat16", "float16"])
def test_narrow_operands_and_results(isa: str, x_dtype: str, out: str) -> None:
    for m, n, k in [(1, 21, 70), (5, 18, 128), (50, 23, 1100)]:
        x, w = operands(m, n, k, x_dtype, "bfloat16")
        wide = compiled("ffi")(x, w)
        if x_dtype == "bfloat16" or isa != "avx512bf16":
            assert scaled_error(wide, x, w) < 3e-7
        got = compiled("ffi", out)(x, w)
        assert got.dtype == out
        np.testing.assert_array_equal(np.asarray(got), np.asarray(wide.astype(out)))


@needs_kernels
@pytest.mark.parametrize("w_dtype", ["float32", "bfloat16", "float16"])
def test_row_bits_do_not_depend_on_the_batch(isa: str, w_dtype: str) -> None:
    x, w = operands(400, 39, 1200, "float32", w_dtype)
    whole = np.asarray(compiled("ffi")(x, w))
    for first, last in [(0, 1), (7, 8), (3, 5), (60, 64), (1, 14), (40, 130), (3, 390)]:
        part = np.asarray(compiled("ffi")(x[first:last], w))
        np.testing.assert_array_equal(part, whole[first:last])


@needs_kernels
@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16"])
def test_zero_rows_at_the_end_are_not_multiplied(isa: str, x_dtype: str) -> None:
    x, w = operands(70, 39, 100, x_dtype, "bfloat16")
    # A row of zeros before others counts; at the end those of either sign do not.
    padded = x.at[20].set(0.0).at[41:].set(0.0).at[50:60].set(-0.0)
    expected = np.asarray(compiled("ffi")(padded[:41], w))
    got = np.asarray(compiled("ffi")(padded, w))
    np.testing.assert_array_equal(got[:41], expected)
    np.testing.assert_array_equal(got[41:], 0.0)
    # Only a row that is left out stays clear of weights that are not finite.
    got = np.asarray(compiled("ffi")(padded, jnp.full_like(w, jnp.nan)))
    assert np.isnan(got[:41]).all() and not got[41:].any()
    for rows in (1, 5):
        assert not np.asarray(compiled("ffi")(jnp.zeros((rows, 100), x_dtype), w)).any()


@needs_kernels
def test_never_reads_past_the_weights(isa: str) -> None:
    """Rows of NaN around w's own rows must not reach the result."""
    big = jnp.full((40, 200), jnp.nan, jnp.bfloat16).at[:33, :].set(0.5)
    x = jnp.ones((3, 200), jnp.float32)
    got = np.asarray(compiled("ffi")(x, big))
    np.testing.assert_array_equal(got[:, :33], 100.0)
    assert np.isnan(got[:, 33:]).all()


@pytest.mark.parametrize(("x_dtype", "w_dtype"), [
    ("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"), ("float16", "bfloat16"), ("float32", "float16"),
])  # fmt: skip
def test_xla_path(x_dtype: str, w_dtype: str) -> None:
    for m in (1, 9):
        x, w = operands(m, 24, 96, x_dtype, w_dtype)
        got = compiled("xla")(x, w)
        rounds = jnp.dtype(w_dtype).itemsize < jnp.dtype(x_dtype).itemsize
        assert scaled_error(got, x, w) < (4e-3 if rounds else 3e-7)


def test_mode_and_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = operands(2, 4, 16, "float32", "float32")
    monkeypatch.setenv(cpu_library.MODE_VARIABLE, "xla")
    assert select_impl() == "xla"
    assert "custom_call" not in compiled("auto").lower(x, w).as_text()
    with pytest.raises(LinearError, match="JAXLLM_CPU_KERNELS=xla"):
        linear(x, w, impl="ffi")
    monkeypatch.setenv(cpu_library.MODE_VARIABLE, "fast")
    with pytest.raises(cpu_library.CpuKernelsError, match="fast"):
        linear(x, w)
    with pytest.raises(LinearError, match="triton"):
        linear(x, w, impl="triton")
    with pytest.raises(LinearError, match="int8"):
        linear(x, w.astype(jnp.int8), impl="xla")
    with pytest.raises(LinearError, match="16"):
        linear(x, w[:, :3], impl="xla")


@needs_kernels
def test_auto_takes_the_kernel_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cpu_library.MODE_VARIABLE, raising=False)
    x, w = operands(2, 4, 16, "float32", "float32")
    assert cpu_library.LINEAR in compiled("auto").lower(x, w).as_text()


def rounded(n: int, k: int) -> tuple[jax.Array, jax.Array]:
    """int8 weights [N, K] that use the whole range, and a scale per row."""
    rng = np.random.default_rng(n * 1009 + k)
    weight = rng.integers(-128, 128, (n, k), dtype=np.int8)
    return jnp.asarray(weight), jnp.asarray(rng.uniform(0.001, 0.1, n), jnp.float32)


LANES = {"base": 4, "avx2": 8, "avx512": 16, "avx512bf16": 16}


def as_integers(x: jax.Array, isa: str) -> np.ndarray:
    """x [M, K] as int8 products see it: multiples of a step of its row."""
    values = np.asarray(x, np.float32)
    group = 2 * LANES[isa]
    steps = -(-values.shape[1] // group) * 2
    limit = np.float32(min(32767, (2**31 - 1) // (128 * steps)))
    largest = np.abs(values).max(axis=1, keepdims=True)
    return np.rint(values * (limit / largest)).astype(np.float64) * (largest / limit)


@needs_kernels
@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16", "float16"])
def test_int8_weights_match_float64(isa: str, x_dtype: str) -> None:
    for m, n, k in [*SHAPES, (2, 5, 9000), (7, 9, 5000)]:
        x, _ = operands(m, n, k, x_dtype, "float32")
        w, scale = rounded(n, k)
        got = jax.jit(lambda x, w, s: linear(x, w, jnp.float32, scale=s, impl="ffi"))(x, w, scale)
        value = w.astype(jnp.float32) * scale[:, None]
        assert scaled_error(got, as_integers(x, isa), value) < 4e-7, (m, n, k)
        assert scaled_error(got, x, value) < 6e-5, (m, n, k)


@needs_kernels
def test_int8_products_stay_within_int32(isa: str) -> None:
    """The largest values everywhere, where a lane's sum comes nearest to its end."""
    for k in (64, 576, 4128, 14336):
        x = jnp.full((5, k), 3.0).at[1].set(-3.0)
        w = jnp.full((4, k), -128, jnp.int8)
        got = jax.jit(lambda x, w, s: linear(x, w, scale=s, impl="ffi"))(x, w, jnp.ones(4))
        want = np.full((5, 4), -384.0 * k)
        want[1] *= -1
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-6)


@needs_kernels
def test_rows_beside_int8_weights_that_are_zero_or_not_finite(isa: str) -> None:
    x, _ = operands(6, 5, 70, "float32", "float32")
    w, scale = rounded(5, 70)
    x = x.at[0].set(0).at[2, 69].set(jnp.nan).at[3, 1].set(-jnp.inf).at[4].set(1e-33)
    product = jax.jit(lambda x, w, s: linear(x, w, scale=s, impl="ffi"))
    got = np.asarray(product(x, w, scale))
    np.testing.assert_array_equal(got[0], 0)
    assert np.isnan(got[2:4]).all()
    assert np.abs(got[4]).max() < 1e-28
    np.testing.assert_array_equal(got[[1, 5]], np.asarray(product(x[jnp.array([1, 5])], w, scale)))


@needs_kernels
def test_rows_of_int8_products_do_not_depend_on_the_batch(isa: str) -> None:
    x, _ = operands(400, 19, 577, "float32", "float32")
    w, scale = rounded(19, 577)
    product = jax.jit(lambda x, w, s: linear(x, w, scale=s, impl="ffi"))
    whole = np.asarray(product(x, w, scale))
    for rows in (1, 2, 7, 49, 193):
        np.testing.assert_array_equal(np.asarray(product(x[:rows], w, scale)), whole[:rows])


@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 9])
def test_int8_weights_by_xla(x_dtype: str, rows: int) -> None:
    x, _ = operands(rows, 18, 130, x_dtype, "float32")
    w, scale = rounded(18, 130)
    got = jax.jit(lambda x, w, s: linear(x, w, jnp.float32, scale=s, impl="xla"))(x, w, scale)
    assert scaled_error(got, x, w.astype(jnp.float32) * scale[:, None]) < 4e-7


def test_int8_weights_need_their_scale() -> None:
    x, w = operands(2, 3, 16, "float32", "float32")
    narrow, scale = rounded(3, 16)
    with pytest.raises(LinearError, match="int8"):
        linear(x, narrow)
    with pytest.raises(LinearError, match=r"\(2,\)"):
        linear(x, narrow, scale=scale[:2])
    with pytest.raises(LinearError, match="float32"):
        linear(x, w, scale=scale)
