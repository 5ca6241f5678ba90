"""Time paged attention: every implementation that runs here, beside the machine's own ceilings and
other kernels.

    python benchmarks/kernels.py                 # the device JAX finds
    python benchmarks/kernels.py --quick --json out.json

On a GPU: decode (batch 1 to 256, context 128 to 32k) and prompt chunks (512 to 8k tokens), 32 query
heads on 8 KV heads of 128, bf16; beside the copy bandwidth and the matmul rate of the same run,
JAX's stock paged attention, and, where they are installed, torch's scaled_dot_product_attention on
KV gathered beforehand and FlashInfer on the same pages. On a CPU: decode, prompt and mixed steps of
a 135M Llama (9 query heads on 3 of 64), the cache write included; beside torch.

Each figure is the median of several runs of a chain of calls inside one program, each call on
blocks of its own, so that neither dispatch nor a cache that the real step would not have is part of
it.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import (
    UnsupportedError,
    allocate_pool,
    attend_and_write,
    available_implementations,
)

BLOCK = 16
# Pool bytes that a chain of calls should cover at least, to be out of reach of any cache.
COLD_BYTES = 400e6
# Above this a case is left out.
MOST_POOL_BYTES = 48e9


@dataclass(frozen=True, slots=True)
class Shape:
    """The heads of one attention layer."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Workload:
    """One step: query tokens and context tokens of each request."""

    name: str
    queries: tuple[int, ...]
    contexts: tuple[int, ...]

    @property
    def decode(self) -> bool:
        return all(n == 1 for n in self.queries)


@dataclass(frozen=True, slots=True)
class Result:
    """One measurement; seconds per call, or None with the reason in `note`."""

    workload: str
    implementation: str
    seconds: float | None
    gigabytes_per_second: float | None = None
    teraflops: float | None = None
    note: str = ""


GPU_SHAPE, CPU_SHAPE = Shape(32, 8, 128), Shape(9, 3, 64)


def gpu_workloads(quick: bool) -> list[Workload]:
    """Decode and prompt steps of the GPU benchmark."""
    batches = (1, 32, 128) if quick else (1, 8, 32, 64, 128, 256)
    contexts = (512, 4096) if quick else (128, 512, 2048, 4096, 8192, 32768)
    chunks = (2048, 8192) if quick else (512, 1024, 2048, 4096, 8192)
    decodes = [Workload(f"decode {b} x {c}", (1,) * b, (c,) * b) for b in batches for c in contexts]
    prompts = [Workload(f"prompt {n}", (n,), (n,)) for n in chunks]
    late = Workload("prompt 2048 after 6144", (2048,), (8192,))
    mixed = Workload(
        "64 decodes x 4096 and a chunk of 1024", (1,) * 64 + (1024,), (4096,) * 64 + (1024,)
    )
    return [*decodes, *prompts, late, mixed]


def cpu_workloads(quick: bool) -> list[Workload]:
    """The six cases of the CPU benchmark."""
    cases = [
        Workload("decode 64 x 256", (1,) * 64, (256,) * 64),
        Workload("decode 64 x 2048", (1,) * 64, (2048,) * 64),
        Workload("decode 1 x 2048", (1,), (2048,)),
        Workload("prompt 512", (512,), (512,)),
        Workload("prompt 512 after 512", (512,), (1024,)),
        Workload("56 decodes x 256 and a chunk of 256", (1,) * 56 + (256,), (256,) * 57),
    ]
    return cases[::2] if quick else cases


def step_bytes(workload: Workload, shape: Shape) -> float:
    """Bytes of K and V (bf16) that a step reads at least."""
    return sum(workload.contexts) * 2 * shape.kv_heads * shape.head_dim * 2


def step_flops(workload: Workload, shape: Shape) -> float:
    """FLOPs of the two products over the visible (query, key) pairs."""
    pairs = sum(
        n * (c - n) + n * (n + 1) // 2
        for n, c in zip(workload.queries, workload.contexts, strict=True)
    )
    return 4.0 * pairs * shape.heads * shape.head_dim


def measure(run: Callable[[], Any], calls: int, budget: float) -> float:
    """Median seconds per call of `run`, which makes `calls` of them and waits; about `budget`
    seconds in all.
    """
    run()
    start = time.perf_counter()
    run()
    once = time.perf_counter() - start
    repeats = int(min(max(budget / max(once, 1e-6), 3), 30))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times) / calls


def layers_of(workload: Workload, shape: Shape) -> int:
    """How many calls a chain makes: enough for their blocks to exceed every cache."""
    return int(np.clip(np.ceil(COLD_BYTES / step_bytes(workload, shape)), 2, 16))


def tables_of(workload: Workload, layers: int) -> np.ndarray:
    """Block tables i32[layers, R, M] into a pool per layer, shuffled, without a block in common."""
    blocks = [-(-c // BLOCK) for c in workload.contexts]
    rng = np.random.default_rng(0)
    tables = np.zeros((layers, len(blocks), max(blocks)), np.int32)
    for table in tables:
        ids = rng.permutation(sum(blocks)) + 1
        for r, mine in enumerate(np.split(ids, np.cumsum(blocks)[:-1])):
            table[r, : len(mine)] = mine
    return tables


def slots_of(workload: Workload, tables: np.ndarray) -> np.ndarray:
    """Where each layer writes its step's K and V, i32[layers, T]."""
    rows = []
    for table in tables:
        row = []
        for r, (n, c) in enumerate(zip(workload.queries, workload.contexts, strict=True)):
            position = np.arange(c - n, c)
            row.append(table[r, position // BLOCK] * BLOCK + position % BLOCK)
        rows.append(np.concatenate(row))
    return np.stack(rows).astype(np.int32)


def time_own(workload: Workload, shape: Shape, impl: str, budget: float) -> float:
    """Seconds per layer of write and attention with implementation `impl`."""
    layers = layers_of(workload, shape)
    tables = tables_of(workload, layers)
    slots = slots_of(workload, tables)
    T = sum(workload.queries)
    rng = np.random.default_rng(1)
    q = jnp.asarray(rng.standard_normal((T, shape.heads, shape.head_dim)), jnp.bfloat16)
    kv = jnp.asarray(rng.standard_normal((T, shape.kv_heads, shape.head_dim)), jnp.bfloat16)
    lens = jnp.asarray(workload.contexts, jnp.int32)
    starts = jnp.asarray(np.concatenate([[0], np.cumsum(workload.queries)]), jnp.int32)
    blocks = 1 + int(tables.max())
    pools = [
        allocate_pool(blocks, shape.kv_heads, BLOCK, shape.head_dim, "bfloat16")
        for _ in range(layers)
    ]

    def chain(pools: Any, q: jax.Array, tables: jax.Array, slots: jax.Array) -> Any:
        x, new_pools = q, []
        for layer, (k_pool, v_pool) in enumerate(pools):
            out, k_pool, v_pool = attend_and_write(
                x, kv, kv, k_pool, v_pool, tables[layer], lens, starts, slots[layer],
                scale=shape.head_dim**-0.5, decode=workload.decode, kv_dtype="bfloat16", impl=impl,
            )  # fmt: skip
            x = (q + 0.001 * out).astype(q.dtype)
            new_pools.append((k_pool, v_pool))
        return new_pools, x

    arguments = (q, jnp.asarray(tables), jnp.asarray(slots))
    compiled = jax.jit(chain, donate_argnums=0).lower(pools, *arguments).compile()

    def run() -> None:
        nonlocal pools
        pools, x = compiled(pools, *arguments)
        jax.block_until_ready(x)

    return measure(run, layers, budget)


def time_stock(workload: Workload, shape: Shape, budget: float) -> float:
    """Seconds per call of JAX's own decode kernel for paged KV, in the layout that it wants."""
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention as stock

    if not workload.decode:
        raise UnsupportedError("decode only")
    blocks = -(-workload.contexts[0] // BLOCK)
    splits = next(s for s in (16, 8, 4, 2, 1) if blocks % (s * 8) == 0 or s == 1)
    R = len(workload.contexts)
    pool = jnp.ones((shape.kv_heads, R * blocks, BLOCK, shape.head_dim), jnp.bfloat16)
    table = jnp.asarray(
        np.random.default_rng(0).permutation(R * blocks).reshape(R, blocks), jnp.int32
    )
    q = jnp.ones((R, shape.heads, shape.head_dim), jnp.bfloat16)
    lens = jnp.asarray(workload.contexts, jnp.int32)
    call = jax.jit(functools.partial(stock, k_splits=splits, pages_per_compute_block=8))
    return measure(lambda: jax.block_until_ready(call(q, pool, pool, table, lens)), 1, budget)


def time_torch(workload: Workload, shape: Shape, budget: float) -> float:
    """Seconds per call of torch's SDPA on contiguous KV in bf16; the gather is not counted."""
    import torch

    on = "cuda" if torch.cuda.is_available() else "cpu"
    if len({*workload.contexts}) > 1 or len({*workload.queries}) > 1:
        raise UnsupportedError("ragged batch")
    R, n, c = len(workload.queries), workload.queries[0], workload.contexts[0]
    options = {"dtype": torch.bfloat16, "device": on}
    copies = layers_of(workload, shape)
    q = torch.randn(R, shape.heads, n, shape.head_dim, **options)
    kv = [torch.randn(2, R, shape.kv_heads, c, shape.head_dim, **options) for _ in range(copies)]
    if n > 1 and n != c:
        mask = torch.ones(n, c, dtype=torch.bool, device=on).tril(c - n)
        extra: dict[str, Any] = {"attn_mask": mask}
    else:
        extra = {"is_causal": n > 1}

    def run() -> None:
        for k, v in kv:
            torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **extra)
        if on == "cuda":
            torch.cuda.synchronize()

    return measure(run, copies, budget)


def time_flashinfer(workload: Workload, shape: Shape, budget: float) -> float:
    """Seconds per call of FlashInfer's paged kernels in bf16 on blocks of the same size."""
    import flashinfer
    import torch

    blocks = [-(-c // BLOCK) for c in workload.contexts]
    on = {"device": "cuda"}
    pages = torch.randperm(sum(blocks), dtype=torch.int32, **on)
    starts = torch.tensor([0, *np.cumsum(blocks)], dtype=torch.int32, **on)
    rows = torch.tensor([0, *np.cumsum(workload.queries)], dtype=torch.int32, **on)
    last = torch.tensor([(c - 1) % BLOCK + 1 for c in workload.contexts], dtype=torch.int32, **on)
    pool_shape = (2, sum(blocks), shape.kv_heads, BLOCK, shape.head_dim)
    k_pool, v_pool = torch.randn(pool_shape, dtype=torch.bfloat16, **on)
    q = torch.randn(sum(workload.queries), shape.heads, shape.head_dim, dtype=torch.bfloat16, **on)
    workspace = torch.empty(256 << 20, dtype=torch.uint8, **on)
    heads = (shape.heads, shape.kv_heads, shape.head_dim, BLOCK)
    types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    if workload.decode:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(starts, pages, last, *heads, **types)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(rows, starts, pages, last, *heads, causal=True, **types)

    def run() -> None:
        for _ in range(4):
            wrapper.run(q, (k_pool, v_pool))
        torch.cuda.synchronize()

    return measure(run, 4, budget)


def copy_bandwidth(megabytes: int) -> float:
    """GB/s, reads and writes together, of adding one to an array."""
    x = jnp.zeros((megabytes << 20) // 4, jnp.float32)
    call = jax.jit(lambda x: x + 1)
    return 2 * x.nbytes / measure(lambda: call(x).block_until_ready(), 1, 0.5) / 1e9


def matmul_rate(size: int) -> float:
    """TFLOP/s of a square bf16 product."""
    x = jnp.ones((size, size), jnp.bfloat16)
    call = jax.jit(lambda x: jnp.dot(x, x, preferred_element_type=jnp.float32))
    return 2 * size**3 / measure(lambda: call(x).block_until_ready(), 1, 0.5) / 1e12


def timers(platform: str, names: Sequence[str] | None) -> dict[str, Callable[..., float]]:
    """What to time on this platform: (workload, shape, budget) -> seconds, by name."""
    here = {"cpu": ("cpu", "xla")}.get(platform, ("mosaic", "triton", "xla"))
    missing = available_implementations()
    found: dict[str, Callable[..., float]] = {
        name: functools.partial(time_own, impl=name) for name in here if missing[name] is None
    }
    others = {"torch": time_torch}
    if platform != "cpu":
        others |= {"stock": time_stock, "flashinfer": time_flashinfer}
    found |= others
    return {n: f for n, f in found.items() if names is None or n in names}


def run_all(
    workloads: Sequence[Workload],
    shape: Shape,
    found: dict[str, Callable[..., float]],
    budget: float,
) -> list[Result]:
    """Time every workload with everything that can do it, printing a line for each."""
    results = []
    for workload in workloads:
        if layers_of(workload, shape) * step_bytes(workload, shape) > MOST_POOL_BYTES:
            continue
        for name, timer in found.items():
            try:
                seconds = timer(workload, shape, budget=budget)
            except (ImportError, AssertionError, RuntimeError, ValueError) as error:
                note = f"{type(error).__name__}: {error}".splitlines()[0][:160]
                results.append(Result(workload.name, name, None, note=note))
            else:
                bandwidth = step_bytes(workload, shape) / seconds / 1e9
                rate = step_flops(workload, shape) / seconds / 1e12
                results.append(Result(workload.name, name, seconds, bandwidth, rate))
            print(format_result(results[-1]), flush=True)
    return results


def format_result(result: Result) -> str:
    """One line of the table."""
    if result.seconds is None:
        return f"{result.workload:40s} {result.implementation:12s} -- {result.note}"
    return (
        f"{result.workload:40s} {result.implementation:12s} {result.seconds * 1e6:10.1f} us"
        f" {result.gigabytes_per_second:9.1f} GB/s {result.teraflops:8.2f} TFLOP/s"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--implementations", nargs="+", help="only these")
    parser.add_argument("--seconds", type=float, default=0.5, help="about so long per figure")
    parser.add_argument("--json", help="write the results here, too")
    options = parser.parse_args(arguments)
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    shape = CPU_SHAPE if on_cpu else GPU_SHAPE
    workloads = (cpu_workloads if on_cpu else gpu_workloads)(options.quick)
    ceilings = {
        "copy_gigabytes_per_second": copy_bandwidth(256 if on_cpu else 4096),
        "matmul_teraflops": matmul_rate(1024 if on_cpu else 8192),
    }
    print(f"{device.device_kind}, jax {jax.__version__}: {ceilings}")
    found = timers(device.platform, options.implementations)
    results = run_all(workloads, shape, found, options.seconds)
    if options.json:
        record = {
            "device": device.device_kind,
            "jax": jax.__version__,
            "shape": asdict(shape),
            "ceilings": ceilings,
            "results": [asdict(result) for result in results],
        }
        with open(options.json, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
