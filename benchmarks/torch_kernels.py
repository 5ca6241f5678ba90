"""The peer of cpu_kernels.py: torch's attention and products on the same shapes.

Run by it with a Python that has torch: prints milliseconds by case and kind as JSON. Keys and
values are contiguous here (torch has no paged attention on CPUs), which is in torch's favour.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

HEADS, KV_HEADS, DIM = 9, 3, 64
SECONDS = 0.5
COPIES = 2


def least(call: Callable[[], Any]) -> list[float]:
    """Milliseconds by the clock, and of all cores together."""
    call()
    walls: list[float] = []
    cores: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(walls) < 2 or time.perf_counter() < end:
        start, start_cores = time.perf_counter(), time.process_time()
        call()
        walls.append(time.perf_counter() - start)
        cores.append(time.process_time() - start_cores)
    return [min(walls) * 1e3, min(cores) * 1e3]


def attention(lengths: list[list[int]], dtype: torch.dtype) -> list[float]:
    """Requests of equal lengths as one batch each; several copies, so that no cache holds them."""
    groups: dict[tuple[int, int], int] = {}
    for rows, context in lengths:
        groups[rows, context] = groups.get((rows, context), 0) + 1
    copies = []
    for _ in range(COPIES):
        batch = []
        for (rows, context), count in groups.items():
            q = torch.randn(count, HEADS, rows, DIM).to(dtype)
            k, v = (torch.randn(count, KV_HEADS, context, DIM).to(dtype) for _ in range(2))
            mask = None
            if rows > 1:
                position = torch.arange(context - rows, context)[:, None]
                mask = torch.arange(context)[None] <= position
            batch.append((q, k, v, mask))
        copies.append(batch)

    def call() -> None:
        for batch in copies:
            for q, k, v, mask in batch:
                scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    return [ms / COPIES for ms in least(call)]


def product(n: int, k: int, m: int, dtype: torch.dtype) -> list[float]:
    w, x = torch.randn(n, k).to(dtype), torch.randn(m, k).to(dtype)
    return least(lambda: torch.nn.functional.linear(x, w))


def main() -> None:
    what, cases = sys.argv[1], json.loads(sys.argv[2])
    kinds = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    result: dict[str, dict[str, list[float]]] = {}
    with torch.inference_mode():
        if what == "attention":
            for name, lengths in cases["attention"].items():
                result[name] = {kind: attention(lengths, t) for kind, t in kinds.items()}
        else:
            for n, k in cases["linear"]:
                for m in cases["rows"]:
                    if m * n > 256 * 49152:
                        continue
                    for kind, t in kinds.items():
                        result[f"{n} {k} {m} {kind}"] = {"linear": product(n, k, m, t)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
