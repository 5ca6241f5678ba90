"""The C++ attention kernels: against the float64 oracle at every instruction set of this CPU, and
what they promise beside numbers: pools in place, ids checked, bits that do not depend on the batch.
"""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels import cpu_library
from pallas_kernels.paged_attention import UnsupportedError, attend_and_write, oracle, write_kv
from pallas_kernels.paged_attention import paged_attention as attend
from pallas_kernels.paged_attention.pool import pool_dtype, quantize, to_storage

pytestmark = pytest.mark.skipif(
    cpu_library.unavailable() is not None, reason="the CPU kernels are not available"
)
SCALES = {"int8": 0.02, "float8_e4m3fn": 0.05, "float8_e5m2": 0.01}


@pytest.fixture(params=cpu_library.runnable_levels())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every instruction set this CPU can run, one after another."""
    monkeypatch.setenv(cpu_library.ISA_VARIABLE, request.param)
    return request.param


class Batch:
    """A random ragged batch with its pools before and after the write, blocks no request owns
    poisoned.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        lengths: list[tuple[int, int]],
        *,
        heads: int = 6,
        kv_heads: int = 2,
        dim: int = 64,
        block_size: int = 16,
        kv_dtype: str = "bfloat16",
        q_dtype: str = "float32",
        as_bits: bool = True,
        padding_rows: int = 3,
    ) -> None:
        """lengths: query rows and context of each request."""
        self.kv_dtype = jnp.dtype(kv_dtype)
        self.scales: list[np.ndarray | None] = [None, None]
        if kv_dtype in SCALES:  # of K and of V, one per KV head, all different
            steps = np.arange(1, 2 * kv_heads + 1, dtype=np.float32).reshape(2, kv_heads)
            self.scales = list(SCALES[kv_dtype] * (1 + steps / 4))
        stored = pool_dtype(kv_dtype, "cpu") if as_bits else self.kv_dtype
        needed = [-(-context // block_size) for _, context in lengths]
        blocks = sum(needed) + 4
        ids = iter(rng.permutation(np.arange(1, blocks)))
        self.tables = np.zeros((len(lengths), max(needed) + 1), np.int32)
        # Entries past a request's context point nowhere: nothing may follow them.
        self.tables[:] = 2**30
        for r, count in enumerate(needed):
            self.tables[r, :count] = [next(ids) for _ in range(count)]
        self.contexts = np.array([context for _, context in lengths], np.int32)
        self.starts = np.cumsum([0, *(rows for rows, _ in lengths)]).astype(np.int32)
        tokens = int(self.starts[-1]) + padding_rows
        self.q = self._random(rng, (tokens, heads, dim), q_dtype)
        self.k = self._random(rng, (tokens, kv_heads, dim), q_dtype)
        self.v = self._random(rng, (tokens, kv_heads, dim), q_dtype)
        self.slots = np.zeros(tokens, np.int32)
        shape = (blocks, kv_heads, block_size, dim)
        poison = np.nan if self.kv_dtype.kind != "i" else 127
        pools = [np.full(shape, poison, np.float32) for _ in range(2)]
        for r, (rows, context) in enumerate(lengths):
            p = np.arange(context)
            slots = self.tables[r, p // block_size] * block_size + p % block_size
            self.slots[self.starts[r] : self.starts[r + 1]] = slots[context - rows :]
            old = slots[: context - rows]
            for pool in pools:
                pool[old // block_size, :, old % block_size] = rng.standard_normal(
                    (len(old), kv_heads, dim), np.float32
                )
        narrow = [
            self._narrow(jnp.asarray(pool).swapaxes(1, 2), stored, scale).swapaxes(1, 2)
            for pool, scale in zip(pools, self.scales, strict=True)
        ]
        self.before = narrow
        self.after = [
            oracle.write_kv(
                self._narrow(jnp.asarray(rows), stored, scale), pool, self.slots, block_size
            )
            for rows, pool, scale in zip((self.k, self.v), narrow, self.scales, strict=True)
        ]

    @staticmethod
    def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return np.asarray(jnp.asarray(rng.standard_normal(shape, np.float32)).astype(dtype))

    def _narrow(self, x: jax.Array, stored: np.dtype, scale: np.ndarray | None) -> np.ndarray:
        """x [..., K, D] as the pool stores it, by the pool's own rounding."""
        if self.kv_dtype.itemsize == 1:
            rows = x.reshape(-1, *x.shape[-2:])
            numbers = quantize(rows, self.kv_dtype, scale).reshape(x.shape)
        else:
            numbers = x.astype(self.kv_dtype)
        return np.asarray(to_storage(numbers, stored))

    def options(self, **more: Any) -> dict[str, Any]:
        named = dict(zip(("k_scale", "v_scale"), self.scales, strict=True))
        scales = {name: scale for name, scale in named.items() if scale is not None}
        return {"scale": self.q.shape[-1] ** -0.5, "kv_dtype": self.kv_dtype} | scales | more

    def expected(self, **more: Any) -> tuple[np.ndarray, np.ndarray]:
        return oracle.paged_attention(
            self.q, *self.after, self.tables, self.contexts, self.starts, **self.options(**more)
        )

    def run(self, **more: Any) -> tuple[Any, jax.Array, jax.Array]:
        # A new function each time: the instruction set is read when it is traced.
        step = jax.jit(
            functools.partial(attend_and_write, impl="cpu", **self.options(**more)),
            donate_argnums=(3, 4),
        )
        pools = [jnp.array(pool) for pool in self.before]
        return step(
            self.q, self.k, self.v, *pools, self.tables, self.contexts, self.starts, self.slots
        )


def check(batch: Batch, tolerance: float, **more: Any) -> None:
    expected, expected_lse = batch.expected(**more)
    (out, lse), k_pool, v_pool = batch.run(return_lse=True, **more)
    np.testing.assert_array_equal(bits(k_pool), bits(batch.after[0]))
    np.testing.assert_array_equal(bits(v_pool), bits(batch.after[1]))
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=0, atol=tolerance)
    np.testing.assert_allclose(np.asarray(lse), expected_lse, rtol=0, atol=2e-5)


def bits(x: Any) -> np.ndarray:
    array = np.asarray(x)
    return array.view(f"u{array.itemsize}")


def random_lengths(rng: np.random.Generator) -> list[tuple[int, int]]:
    rows = rng.choice([1, 1, 1, 2, 5, 17, 40, 110], rng.integers(1, 5))
    return [(int(n), int(n + rng.choice([0, 3, 15, 16, 63, 64, 65, 530]))) for n in rows]


@pytest.mark.parametrize("seed", range(10))
def test_random_batches(isa: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    heads, kv_heads = [(9, 3), (4, 4), (8, 2), (5, 1), (32, 8), (40, 1), (200, 2)][seed % 7]
    lengths = random_lengths(rng)
    if heads > 40:
        lengths = [(min(n, 3), c) for n, c in lengths[:2]]
    batch = Batch(
        rng,
        lengths,
        heads=heads,
        kv_heads=kv_heads,
        dim=[64, 128, 80, 96, 256, 16, 112][(seed * 3) % 7],
        block_size=[16, 8, 32, 64, 128][seed % 5],
        kv_dtype=["bfloat16", "float32", "float16"][seed % 3],
        q_dtype="float32",
        as_bits=bool(seed % 2),
        padding_rows=seed % 4,
    )
    options: dict[str, Any] = {}
    if seed % 3 == 1:
        options["window"] = [1, 5, 64, 200, 513][seed % 5]
    if seed % 4 == 2:
        options["soft_cap"] = 20.0
    if seed % 2:
        options["sinks"] = rng.standard_normal(heads).astype(np.float32)
    check(batch, 2e-6 * 4, **options)


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("as_bits", [True, False])
def test_quantized_pools(isa: str, kv_dtype: str, as_bits: bool) -> None:
    rng = np.random.default_rng(3)
    lengths = [(1, 70), (20, 100), (3, 3)]
    check(Batch(rng, lengths, kv_dtype=kv_dtype, as_bits=as_bits), 1e-5)


@pytest.mark.parametrize("q_dtype", ["bfloat16", "float16"])
def test_narrow_queries(isa: str, q_dtype: str) -> None:
    rng = np.random.default_rng(4)
    batch = Batch(rng, [(1, 90), (30, 64), (1, 1)], q_dtype=q_dtype)
    check(batch, 2e-2 if q_dtype == "bfloat16" else 2e-3)
    wide = Batch(np.random.default_rng(4), [(1, 90), (30, 64), (1, 1)])
    wide.q, wide.k, wide.v = (np.asarray(a, np.float32) for a in (batch.q, batch.k, batch.v))
    # The result is that of f32 queries, rounded once.
    np.testing.assert_array_equal(
        bits(batch.run()[0]), bits(np.asarray(wide.run()[0].astype(q_dtype)))
    )


@pytest.mark.parametrize(
    "kv_dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8"]
)
def test_written_bits(isa: str, kv_dtype: str) -> None:
    """Rounding, saturation and the smallest numbers, bit for bit as the XLA write does them."""
    rng = np.random.default_rng(7)
    batch = Batch(rng, [(32, 32)], dim=32, kv_dtype=kv_dtype, padding_rows=2)
    shape = batch.k.shape
    options: dict[str, Any] = {"kv_dtype": batch.kv_dtype}
    if batch.scales[0] is not None:
        options |= {"k_scale": np.array([0.5, 2], np.float32), "v_scale": np.float32(0.7)}
    write = jax.jit(functools.partial(write_kv, **options))
    for source in ("float32", "bfloat16", "float16"):
        for name in ("k", "v"):
            signs = rng.choice([-1.0, 1.0], shape)
            powers = np.exp2(rng.uniform(-20, 11, shape)) * signs
            halves = rng.integers(-400, 400, shape) / 2.0  # the ties of int8
            rows = np.where(rng.random(shape) < 0.3, halves, powers).astype(np.float32)
            setattr(batch, name, np.asarray(jnp.asarray(rows).astype(source)))
        expected = write(batch.k, batch.v, *map(jnp.array, batch.before), batch.slots)
        _, *written = batch.run(**options)
        for ours, theirs in zip(written, expected, strict=True):
            np.testing.assert_array_equal(bits(ours)[1:], bits(theirs)[1:], err_msg=source)


def test_bits_do_not_depend_on_batch_or_chunking(isa: str) -> None:
    """One sequence whole, in chunks, token by token, and amid others gives the same bits."""
    rng = np.random.default_rng(5)
    total = 700
    batch = Batch(rng, [(total, total)], heads=6, kv_heads=2, padding_rows=0)
    for window in (None, 100):
        whole, k_pool, v_pool = batch.run(window=window)
        step = jax.jit(
            functools.partial(attend, impl="cpu", **batch.options(window=window)),
            static_argnames=("decode",),
        )
        for first, last in [(0, 1), (63, 64), (640, 641), (699, 700), (500, 530), (1, 600)]:
            part = step(
                batch.q[first:last], k_pool, v_pool, batch.tables,
                np.array([last], np.int32), np.array([0, last - first], np.int32),
            )  # fmt: skip
            np.testing.assert_array_equal(bits(part), bits(whole)[first:last])
        tables = np.repeat(batch.tables, 5, axis=0)
        ends = np.array([700, 600, 513, 512, 30], np.int32)
        starts = np.array([0, 1, 3, 43, 44, 74], np.int32)
        rows = np.concatenate(
            [np.arange(e - n, e) for e, n in zip(ends, np.diff(starts), strict=True)]
        )
        mixed = step(batch.q[rows], k_pool, v_pool, tables, ends, starts)
        np.testing.assert_array_equal(bits(mixed), bits(whole)[rows])


@pytest.mark.parametrize(
    ("kv_dtype", "dim", "soft_cap"),
    [
        ("bfloat16", 80, None),
        ("float32", 64, 20.0),
        ("float16", 16, None),
        ("float8_e4m3fn", 128, None),
        ("int8", 112, None),
    ],
)
def test_few_rows_and_many_give_the_same_bits(
    isa: str, kv_dtype: str, dim: int, soft_cap: float | None
) -> None:
    """Few rows read the pool where it lies, many share copies of it in another layout."""
    batch = Batch(np.random.default_rng(8), [(90, 90)], kv_dtype=kv_dtype, dim=dim, padding_rows=0)
    step = jax.jit(functools.partial(attend, impl="cpu", **batch.options(soft_cap=soft_cap)))
    whole = step(batch.q, *batch.after, batch.tables, batch.contexts, batch.starts)
    alone = step(
        batch.q, *batch.after, np.repeat(batch.tables, 90, axis=0),
        np.arange(1, 91, dtype=np.int32), np.arange(91, dtype=np.int32),
    )  # fmt: skip
    np.testing.assert_array_equal(bits(whole), bits(alone))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("table", "block id 4096 of request 1"),
        ("negative table", "block id -1 of request 1"),
        ("slot", "slot 100000 of token 2"),
        ("negative slot", "slot -5 of token 2"),
        ("context", "context_len 5000 of request 0"),
        ("starts", "query_starts fall at the end of request 1"),
        ("rows", "but there are 6 query rows"),
        ("queries", "4 query rows of request 0 exceed its context of 3"),
    ],
)
def test_ids_outside_the_pool_are_errors(what: str, message: str) -> None:
    batch = Batch(np.random.default_rng(0), [(4, 20), (1, 40)], padding_rows=1)
    match what:
        case "table":
            batch.tables[1, 2] = 4096
        case "negative table":
            batch.tables[1, 0] = -1
        case "slot":
            batch.slots[2] = 100000
        case "negative slot":
            batch.slots[2] = -5
        case "context":
            batch.contexts[0] = 5000
        case "starts":
            batch.starts[2] = 2
        case "rows":
            batch.starts[2] = 7
        case "queries":
            batch.contexts[0] = 3
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(batch.run())


def test_refuses_head_dims_by_name() -> None:
    batch = Batch(np.random.default_rng(0), [(1, 4)], dim=40)
    with pytest.raises(UnsupportedError, match="head_dim 40"):
        batch.run()


def test_donated_pools_stay_where_they_are() -> None:
    batch = Batch(np.random.default_rng(1), [(1, 30), (5, 9)])
    step = jax.jit(
        functools.partial(attend_and_write, impl="cpu", **batch.options()), donate_argnums=(3, 4)
    )
    arguments = (batch.tables, batch.contexts, batch.starts, batch.slots)
    pools = [jnp.array(pool) for pool in batch.before]
    executable = step.lower(batch.q, batch.k, batch.v, *pools, *arguments).compile()
    assert "copy" not in executable.as_text()
    stats = executable.memory_analysis()
    assert stats.alias_size_in_bytes == 2 * pools[0].nbytes
    assert stats.temp_size_in_bytes < 4096
    where = [pool.unsafe_buffer_pointer() for pool in pools]
    _, *after = executable(batch.q, batch.k, batch.v, *pools, *arguments)
    assert [pool.unsafe_buffer_pointer() for pool in after] == where
    assert all(pool.is_deleted() for pool in pools)


def test_pools_that_are_not_donated_are_left_alone() -> None:
    batch = Batch(np.random.default_rng(1), [(1, 30), (5, 9)])
    step = jax.jit(functools.partial(attend_and_write, impl="cpu", **batch.options()))
    pools = [jnp.array(pool) for pool in batch.before]
    arguments = (batch.tables, batch.contexts, batch.starts, batch.slots)
    _, k_pool, _ = step(batch.q, batch.k, batch.v, *pools, *arguments)
    np.testing.assert_array_equal(bits(pools[0]), bits(batch.before[0]))
    np.testing.assert_array_equal(bits(k_pool), bits(batch.after[0]))


def test_many_callers_at_once() -> None:
    """More callers than threads, on two devices: none waits for ever, and bits stay the same."""
    batch = Batch(np.random.default_rng(6), [(1, 1100), (40, 200), (1, 30)], padding_rows=0)
    step = jax.jit(functools.partial(attend, impl="cpu", **batch.options()))
    arguments = (batch.tables, batch.contexts, batch.starts)
    expected = bits(step(batch.q, *batch.after, *arguments))

    def call(index: int) -> bool:
        with jax.default_device(jax.devices()[index % 2]):
            results = [step(batch.q, *batch.after, *arguments) for _ in range(15)]
        return all((bits(result) == expected).all() for result in results)

    with ThreadPoolExecutor(max_workers=6) as threads:
        assert all(threads.map(call, range(12), timeout=120))


def sharded(batch: Batch, devices: int) -> Callable[..., Any]:
    mesh = Mesh(np.array(jax.devices()[:devices]), ("tensor",))
    heads = PartitionSpec(None, "tensor", None)
    pool = PartitionSpec(None, "tensor", None, None)
    everywhere = PartitionSpec()
    return jax.jit(
        jax.shard_map(
            functools.partial(attend_and_write, impl="cpu", **batch.options()),
            mesh=mesh,
            in_specs=(heads, heads, heads, pool, pool, *[everywhere] * 4),
            out_specs=(heads, pool, pool),
        ),
        donate_argnums=(3, 4),
    )


def test_inside_shard_map() -> None:
    """Every device has its KV heads; together they give what one gives, bit for bit."""
    batch = Batch(np.random.default_rng(2), [(1, 600), (20, 64)], heads=12, kv_heads=4)
    alone, k_alone, _ = batch.run()
    pools = [jnp.array(pool) for pool in batch.before]
    arguments = (batch.tables, batch.contexts, batch.starts, batch.slots)
    out, k_pool, _ = sharded(batch, 4)(batch.q, batch.k, batch.v, *pools, *arguments)
    np.testing.assert_array_equal(bits(out), bits(alone))
    np.testing.assert_array_equal(bits(k_pool), bits(k_alone))
