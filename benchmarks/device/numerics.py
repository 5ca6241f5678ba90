"""Run the property grid compiled, on the GPU that is there, for each GPU implementation, and write
what came out.

    python -m benchmarks.device.numerics --json numerics.json

It confirms on a device what interpretation and compilation show without one. Exit status 1 if a
case fails.
"""

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import mosaic, triton, write_kv, xla
from pallas_kernels.paged_attention.contract import UnsupportedError
from pallas_kernels.paged_attention.registry import select_impl
from pallas_kernels.testing.grid import GRID, check_case

IMPLEMENTATIONS = {"mosaic": mosaic, "triton": triton, "xla": xla}


def check_grid(name: str) -> list[dict[str, Any]]:
    """Largest error, or the failure, of each case."""
    module = IMPLEMENTATIONS[name]
    records = []
    for case in GRID:
        record: dict[str, Any] = {"implementation": name, "case": str(case)}
        if name == "mosaic" and case.dtype == "float32":
            record["refused"] = True
        else:
            attend = module.attend
            if name != "xla":
                attend = functools.partial(attend, splits=case.splits)
            try:
                record["error"] = check_case(case, attend)
            except Exception as error:
                record["failure"] = f"{type(error).__name__}: {error}"[:500]
        records.append(record)
        print(record, flush=True)
    return records


def check_write() -> dict[str, Any]:
    """Whether a donated pool is written in place on this device."""
    pool = jnp.zeros((8192, 8, 16, 128), jnp.bfloat16)
    rows = jnp.ones((64, 8, 128), jnp.bfloat16)
    slots = jnp.arange(16, 80, dtype=jnp.int32)
    compiled = (
        jax.jit(write_kv, donate_argnums=(2, 3)).lower(rows, rows, pool, pool + 0, slots).compile()
    )
    memory = compiled.memory_analysis()
    return {
        "pool_bytes": 2 * pool.nbytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", required=True)
    parser.add_argument("--implementations", nargs="+", default=list(IMPLEMENTATIONS))
    options = parser.parse_args(arguments)
    np.seterr(all="ignore")
    try:
        chosen = select_impl()
    except UnsupportedError as error:
        chosen = str(error)
    records = [record for name in options.implementations for record in check_grid(name)]
    report = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "auto": chosen,
        "write": check_write(),
        "grid": records,
    }
    with open(options.json, "w") as file:
        json.dump(report, file, indent=1)
    return int(any("failure" in record for record in records))


if __name__ == "__main__":
    sys.exit(main())
