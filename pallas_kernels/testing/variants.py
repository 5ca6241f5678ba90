"""The kernel variants of the tuning tables, with what each call moves and computes.

A variant is one row of a tuning table at a canonical call: 32 query heads on 8 KV heads, blocks of
16, the decode of 64 requests at a context of 4096, or a prompt chunk of 4096 tokens. Figures of the
part are those of NVIDIA's H200 data sheet: 4.8 TB/s, 989 TFLOP/s in bf16, 132 multiprocessors.
"""

from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import mosaic, triton, tuning
from pallas_kernels.paged_attention.contract import HEAD_DIMS
from pallas_kernels.testing.aot import MULTIPROCESSORS, Kernel, compile_for_h200

BANDWIDTH = 4.8e12  # bytes per second
FLOPS = 989e12  # per second, dense bf16
CLOCK = 1.755e9  # Hz, boost under matrix load
SHARED_BYTES_PER_CLOCK = 128
EXPONENTIALS_PER_CLOCK = 16
REQUESTS, CONTEXT, CHUNK, HEADS, KV_HEADS, BLOCK = 64, 4096, 4096, 32, 8, 16

PHASES: tuple[tuning.Phase, ...] = get_args(tuning.Phase.__value__)
IMPLEMENTATIONS = {"mosaic": mosaic.attend, "triton": triton.attend}


@dataclass(frozen=True, slots=True)
class Variant:
    """One (implementation, head_dim, type of KV numbers); it has a kernel for each phase."""

    implementation: str
    head_dim: int
    kv_dtype: str

    def __str__(self) -> str:
        return f"{self.implementation}-d{self.head_dim}-{self.kv_dtype}"


def variants() -> list[Variant]:
    """Every variant the tuning tables can choose on a Hopper GPU."""
    types = dict.fromkeys(IMPLEMENTATIONS, ("bfloat16", "float8_e4m3fn"))
    return [
        Variant(name, head_dim, kv_dtype)
        for name, kv_dtypes in types.items()
        for head_dim in HEAD_DIMS
        for kv_dtype in kv_dtypes
    ]


def operands(
    head_dim: int, kv_dtype: str, *, tokens: int = CHUNK, requests: int = REQUESTS
) -> list[jax.ShapeDtypeStruct]:
    """Shapes of a mixed call: rows of q over requests of up to CONTEXT tokens."""
    width = CONTEXT // BLOCK
    pool = ((requests * width + 1, KV_HEADS, BLOCK, head_dim), kv_dtype)
    shapes = [
        ((tokens, HEADS, head_dim), "bfloat16"),
        pool,
        pool,
        ((requests, width), "int32"),
        ((requests,), "int32"),
        ((requests + 1,), "int32"),
    ]
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes]


def compile_variant(variant: Variant) -> dict[tuning.Phase, Kernel]:
    """The two kernels of a variant by phase, compiled for an H200."""

    def call(*arguments: jax.Array) -> Any:
        return IMPLEMENTATIONS[variant.implementation](
            *arguments, scale=variant.head_dim**-0.5, kv_dtype=jnp.dtype(variant.kv_dtype)
        )

    _, kernels = compile_for_h200(call, *operands(variant.head_dim, variant.kv_dtype))
    return {
        phase: next(k for k in kernels if k.name.startswith(f"paged_attention_{phase}"))
        for phase in PHASES
    }


@dataclass(frozen=True, slots=True)
class Cost:
    """What the canonical call of one phase moves through device memory, and computes."""

    bytes: int
    flops: int

    @property
    def seconds(self) -> float:
        """The roofline time on an H200."""
        return max(self.bytes / BANDWIDTH, self.flops / FLOPS)


def cost(head_dim: int, kv_dtype: str, phase: tuning.Phase) -> Cost:
    """The least that the canonical call costs.

    K, V and q are read once, out is written once, whatever the implementation.
    """
    number = jnp.dtype(kv_dtype).itemsize
    if phase == "decode":
        keys = REQUESTS * CONTEXT
        rows = REQUESTS
        pairs = keys
    else:
        keys, rows = CHUNK, CHUNK
        pairs = CHUNK * (CHUNK + 1) // 2
    moved = 2 * keys * KV_HEADS * head_dim * number + 2 * rows * HEADS * head_dim * 2
    return Cost(moved, 4 * pairs * HEADS * head_dim)


@dataclass(frozen=True, slots=True)
class TileClocks:
    """Clocks of one multiprocessor for one key tile of the Mosaic kernel, by unit."""

    tensor: float
    shared: float
    exponential: float
    memory: float

    @property
    def busiest_on_chip(self) -> float:
        return max(self.tensor, self.shared, self.exponential)

    @property
    def in_turn(self) -> float:
        """Clocks if products and softmax take turns, as in a block with one consumer."""
        return max(self.tensor, self.shared) + self.exponential


def tile_clocks(head_dim: int, kv_dtype: str, phase: tuning.Phase) -> TileClocks:
    """The clocks of one key tile, all consumers together.

    memory is what the tile's bytes take at full bandwidth. A wgmma of m64 n k16 reads 64 rows of A
    and n of B from shared memory, 32 bytes each, and computes 2 * 64 * n * 16 FLOPs.
    """
    number = jnp.dtype(kv_dtype).itemsize
    tile = tuning.mosaic_tile(head_dim, number, phase)
    per_clock = FLOPS / MULTIPROCESSORS / CLOCK
    width = head_dim // tile.column_groups
    scores = 2 * 64 * tile.keys * head_dim
    product = 2 * 64 * tile.keys * width
    read = (64 + tile.keys) * 32 * head_dim / 16
    read += (64 + tile.columns) * 32 * (tile.keys / 16) * (width / tile.columns)
    written = 64 * tile.keys * 2
    loaded = 2 * tile.keys * head_dim * number
    converted = 0
    if number == 1:
        # Raw numbers are read and wider ones written, by each row group for itself.
        converted = tile.row_groups * (loaded + 2 * loaded)
    shared = (tile.consumers * (read + written) + loaded + converted) / SHARED_BYTES_PER_CLOCK
    return TileClocks(
        tensor=tile.consumers * (scores + product) / per_clock,
        shared=shared,
        exponential=tile.consumers * 64 * tile.keys / EXPONENTIALS_PER_CLOCK,
        memory=loaded / (BANDWIDTH / MULTIPROCESSORS / CLOCK),
    )


def useful_share(head_dim: int, kv_dtype: str) -> float:
    """The part of a prompt tile's FLOPs that the caller asked for; the rest repeats QK."""
    tile = tuning.mosaic_tile(head_dim, jnp.dtype(kv_dtype).itemsize, "prompt")
    return 2 / (tile.column_groups + 1)
