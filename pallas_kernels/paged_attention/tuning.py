"""Tile sizes per GPU generation, as data.

A choice is keyed by (capability, head_dim, group, bytes per KV number, phase). Rows are looked up
from the most to the least particular; the report of pallas_kernels.testing compiles every row and
prints registers, spills and shared memory.
"""

from dataclasses import dataclass
from typing import Literal

type Phase = Literal["decode", "prompt"]


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU: its compute capability and the number of its multiprocessors."""

    capability: str
    multiprocessors: int


TARGETS = {
    "9.0": Target("9.0", 132),
    "8.0": Target("8.0", 108),
    "8.6": Target("8.6", 84),
    "8.9": Target("8.9", 142),
}


def target(capability: str | None) -> Target:
    """The facts of a capability; an unknown one is taken for the nearest older one."""
    known = [key for key in TARGETS if capability is None or key <= capability]
    return TARGETS[max(known)] if known else TARGETS["8.0"]


@dataclass(frozen=True, slots=True)
class TritonTile:
    """What a thread block of triton.py takes.

    rows of q (tokens times heads), keys per step, warps, pipeline stages; blocks_per_sm is how many
    of them a multiprocessor holds at once, for the split plan.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    blocks_per_sm: int = 2


def triton_tile(
    capability: str, head_dim: int, heads: int, kv_bytes: int, phase: Phase
) -> TritonTile:
    """The tile for `heads` query heads of one KV head.

    rows is at least 16, the least a tensor core takes.
    """
    wide = head_dim > 128
    rows = max(16, 1 << (heads - 1).bit_length())
    if phase == "decode":
        keys = 32 if wide or kv_bytes == 4 else 64
        return TritonTile(rows, keys, warps=4, stages=2 if kv_bytes == 4 else 3)
    rows = max(rows, 32 if kv_bytes == 4 or wide else 64)
    return TritonTile(
        rows, keys=32 if wide or kv_bytes == 4 else 64, warps=4, stages=2, blocks_per_sm=1
    )


@dataclass(frozen=True, slots=True)
class MosaicTile:
    """What a thread block of mosaic.py takes.

    keys per stage, stages of the ring, consumer warpgroups. A warpgroup takes 64 rows of q, or
    shares them with its column_groups - 1 fellows, which take other parts of head_dim. columns is
    how much of head_dim one accumulator spans; blocks_per_sm is how many thread blocks a
    multiprocessor holds at once, for the split plan.
    """

    keys: int
    stages: int
    consumers: int
    columns: int
    column_groups: int = 1
    blocks_per_sm: int = 1

    @property
    def producer_registers(self) -> int:
        """Registers per thread of the producer where two consumers take more than a third."""
        return 40 if self.column_groups == 1 else 56

    @property
    def consumer_registers(self) -> int:
        """What the producer leaves each of two consumers, in steps of 8."""
        return (65536 // 128 - self.producer_registers) // 2 // 8 * 8

    @property
    def row_groups(self) -> int:
        """How many times 64 rows the thread block takes."""
        return self.consumers // self.column_groups


def mosaic_tile(head_dim: int, kv_bytes: int, phase: Phase) -> MosaicTile:
    """The tile for a head_dim and the width of a KV number."""
    columns = 64 if head_dim % 64 == 0 else head_dim
    if head_dim > 128:
        return MosaicTile(64, 2, consumers=2, columns=columns, column_groups=2)
    if phase == "decode":
        return MosaicTile(64, 4, consumers=1, columns=columns)
    if kv_bytes == 1 and head_dim == 128:
        return MosaicTile(64, 4, consumers=2, columns=columns, column_groups=2)
    return MosaicTile(64, 4, consumers=2, columns=columns)
