"""Print what the compiler says about every kernel variant, beside each call's roofline.

    JAX_PLATFORMS=cpu python -m pallas_kernels.testing.report --implementation mosaic --head-dim 128

Compiles for an H200 without one (the extra `kernels-aot`). Nothing here is a measurement of speed.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence

from pallas_kernels.testing.aot import AotError
from pallas_kernels.testing.variants import (
    PHASES,
    Variant,
    compile_variant,
    cost,
    tile_clocks,
    useful_share,
    variants,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 1 where a kernel spills."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--implementation", choices=("mosaic", "triton"))
    parser.add_argument("--head-dim", type=int)
    options = parser.parse_args(arguments)
    chosen = [
        v
        for v in variants()
        if options.implementation in (None, v.implementation)
        and options.head_dim in (None, v.head_dim)
    ]
    try:
        spilled = print_compiled(chosen)
    except AotError as error:
        print(error, file=sys.stderr)
        return 2
    print()
    print_clocks(chosen)
    return int(spilled)


def print_compiled(chosen: Iterable[Variant]) -> bool:
    """The table of compiled kernels; True where one spills."""
    header = (
        "variant", "phase", "registers", "spills B", "shared B", "threads", "blocks/SM",
        "occupancy", "bytes MB", "GFLOP", "roofline us",
    )  # fmt: skip
    _print_row(header)
    _print_row(["---"] * len(header))
    spilled = False
    for variant in chosen:
        for phase, kernel in compile_variant(variant).items():
            least = cost(variant.head_dim, variant.kv_dtype, phase)
            spilled |= kernel.spills > 0
            _print_row(
                (
                    variant,
                    phase,
                    kernel.registers,
                    kernel.spills,
                    kernel.shared_memory,
                    kernel.threads,
                    kernel.blocks_per_sm,
                    f"{kernel.occupancy:.0%}",
                    f"{least.bytes / 1e6:.1f}",
                    f"{least.flops / 1e9:.1f}",
                    f"{least.seconds * 1e6:.1f}",
                )
            )
    return spilled


def print_clocks(chosen: Iterable[Variant]) -> None:
    """The table of clocks per key tile of the Mosaic kernel: which unit bounds it."""
    header = ("variant", "phase", "tensor", "shared", "exp", "device memory", "bound")
    _print_row(header)
    _print_row(["---"] * len(header))
    for variant in (v for v in chosen if v.implementation == "mosaic"):
        for phase in PHASES:
            clocks = tile_clocks(variant.head_dim, variant.kv_dtype, phase)
            if phase == "decode":
                bound = "device memory" if clocks.in_turn <= clocks.memory else "on chip"
                reach = min(1.0, clocks.memory / clocks.in_turn)
                bound += f": up to {reach:.0%} of bandwidth with one block per multiprocessor"
            else:
                useful = useful_share(variant.head_dim, variant.kv_dtype)
                reach = useful * clocks.tensor / clocks.busiest_on_chip
                bound = f"up to {reach:.0%} of the matmul rate"
            _print_row(
                (
                    variant,
                    phase,
                    f"{clocks.tensor:.0f}",
                    f"{clocks.shared:.0f}",
                    f"{clocks.exponential:.0f}",
                    f"{clocks.memory:.0f}",
                    bound,
                )
            )


def _print_row(cells: Iterable[object]) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
