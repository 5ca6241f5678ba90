"""The property grid: cases that together cover the contract, run against every implementation.

Features are paired rather than multiplied out: every head_dim, block size, group, number type and
option appears, with contexts at, one before and one after the edges of blocks and key tiles, and
options meet one another at least once.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.testing.batches import Batch, make_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class GridCase:
    """One batch and the options of one call; lengths are tokens."""

    queries: Sequence[int]
    contexts: Sequence[int]
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    block_size: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    scales: bool = False
    decode: bool = False
    shared_blocks: int = 0
    padding_rows: int = 3
    table_width: int = 12
    splits: int = 1

    def __str__(self) -> str:
        extras = [
            name
            for name in ("window", "soft_cap", "sinks", "scales", "decode")
            if getattr(self, name)
        ]
        shape = f"{self.heads[0]}over{self.heads[1]}-d{self.head_dim}-b{self.block_size}"
        return "-".join([shape, self.dtype, self.kv_dtype, *extras])

    def batch(self, seed: int = 1) -> Batch:
        live = sum(self.queries)
        return make_batch(
            self.queries,
            self.contexts,
            heads=self.heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            tokens=len(self.queries) if self.decode else live + self.padding_rows,
            table_width=self.table_width,
            shared_blocks=self.shared_blocks,
            seed=seed,
        )

    def options(self) -> dict[str, Any]:
        """Keyword arguments that the oracle and the implementations share."""
        H, K = self.heads
        rng = np.random.default_rng(5)
        options: dict[str, Any] = {"scale": self.head_dim**-0.5}
        if self.window:
            options["window"] = self.window
        if self.soft_cap:
            options["soft_cap"] = self.soft_cap
        if self.sinks:
            options["sinks"] = (2 + rng.standard_normal(H)).astype(np.float32)
        if self.scales:
            unit = 0.025 if self.kv_dtype == "int8" else 1.0
            options["k_scale"] = rng.uniform(0.5, 1.5, K).astype(np.float32) * unit
            options["v_scale"] = rng.uniform(0.5, 1.5, K).astype(np.float32) * unit
        return options

    @property
    def tolerance(self) -> float:
        """The largest error allowed.

        Rounding of sums in f32, and a few ulps where numbers are narrower.
        """
        if self.dtype == self.kv_dtype == "float32":
            return 2e-5
        return 3e-3 if self.dtype == self.kv_dtype == "float16" else 1.5e-2


GRID = (
    GridCase(queries=[1, 1, 0], contexts=[64, 65, 0], decode=True, heads=(8, 1), splits=2),
    GridCase(
        queries=[1], contexts=[129], decode=True, heads=(9, 3), block_size=8, window=24,
        table_width=17,
    ),
    GridCase(queries=[7, 1], contexts=[7, 33], heads=(3, 1), head_dim=80, window=5),
    GridCase(
        queries=[70, 1], contexts=[191, 63], heads=(2, 2), head_dim=96, block_size=32,
        soft_cap=2.0, table_width=6,
    ),
    GridCase(
        queries=[17, 0, 2], contexts=[65, 0, 130], heads=(8, 1), head_dim=128, block_size=64,
        dtype="float16", kv_dtype="float16", sinks=True, table_width=3,
    ),
    GridCase(
        queries=[5, 1], contexts=[133, 63], kv_dtype="float8_e4m3fn", scales=True, head_dim=128,
    ),
    GridCase(
        queries=[3, 1], contexts=[19, 40], heads=(1, 1), head_dim=256, block_size=8,
        kv_dtype="float8_e5m2", window=1, sinks=True, table_width=16,
    ),
    GridCase(
        queries=[1, 9, 1], contexts=[31, 32, 1], heads=(4, 1), kv_dtype="int8", scales=True,
        soft_cap=5.0,
    ),
    GridCase(queries=[43], contexts=[44], heads=(6, 2), window=400, sinks=True, soft_cap=3.0),
    GridCase(
        queries=[1, 1], contexts=[150, 17], decode=True, heads=(4, 1), head_dim=256, sinks=True,
        soft_cap=4.0, shared_blocks=1, splits=3,
    ),
    GridCase(
        queries=[20, 13], contexts=[100, 97], heads=(7, 1), head_dim=128, window=30,
        shared_blocks=2,
    ),
    GridCase(
        queries=[1], contexts=[250], decode=True, heads=(3, 1), head_dim=128, dtype="float16",
        kv_dtype="int8", scales=True, window=100, block_size=64, table_width=4,
    ),
    GridCase(queries=[1, 6], contexts=[16, 15], dtype="float32", kv_dtype="float32"),
    GridCase(queries=[3, 1], contexts=[70, 81], heads=(80, 1)),
    # More key tiles than any ring has stages.
    GridCase(queries=[1], contexts=[330], decode=True, heads=(2, 1), table_width=21),
    GridCase(queries=[30], contexts=[323], heads=(2, 1), table_width=21),
)  # fmt: skip


def run_case(
    case: GridCase, attend: Callable[..., Any], platform: str | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of one implementation under jit, as float64; platform: whose pool storage
    (default: numbers).
    """
    # On a CPU the compile is most of the time; the numbers are the same.
    quick = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    run = jax.jit(
        functools.partial(
            attend,
            **case.options(),
            return_lse=True,
            decode=case.decode,
            kv_dtype=jnp.dtype(case.kv_dtype),
        ),
        compiler_options=quick,
    )
    out, lse = run(*case.batch().operands(platform))
    if out.dtype != case.dtype or lse.dtype != jnp.float32:
        raise TypeError(f"out is {out.dtype} and lse {lse.dtype} for {case}")
    return np.asarray(out, np.float64), np.asarray(lse, np.float64)


def check_case(case: GridCase, attend: Callable[..., Any], platform: str | None = None) -> float:
    """Compare with the oracle: AssertionError where they differ, else the largest error."""
    out, lse = run_case(case, attend, platform)
    expected, expected_lse = case.batch().expected(**case.options())
    np.testing.assert_allclose(out, expected, atol=case.tolerance, err_msg=f"out of {case}")
    np.testing.assert_allclose(lse, expected_lse, atol=2e-3, err_msg=f"lse of {case}")
    live = int(case.batch().query_starts[-1])
    np.testing.assert_array_equal(out[live:], 0.0, err_msg=f"padding rows of {case}")
    return float(np.abs(out - expected).max())
