"""The CPU kernels against XLA (and torch, in an environment of its own): attention, products,
sampling.

    python benchmarks/cpu_kernels.py attention [--torch-python ENV/bin/python]
    python benchmarks/cpu_kernels.py linear [--torch-python ENV/bin/python]
    python benchmarks/cpu_kernels.py sampling
    python benchmarks/cpu_kernels.py step

Times are the least of many calls, in milliseconds: by the clock, and in brackets the time of all
cores together, which other processes disturb less. Attention is timed per layer
inside one program of several chained calls with donated pools, over disjoint random blocks of two
pools of 201 MB, so that no context stays in a cache; the model's shape is that of a 135M Llama (9
heads on 3 KV heads of 64, block size 16, bf16 pools, f32 queries). `step` is one greedy decode step
of that model with random weights, context 256, from token ids to token ids.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxllm.models.config import llama_config
from jaxllm.models.layers import Ops
from jaxllm.models.llama import LlamaForCausalLM
from pallas_kernels import cpu_library
from pallas_kernels.linear import linear
from pallas_kernels.paged_attention import attend_and_write
from pallas_kernels.sampling import inverse_cdf_draw, two_stage_argmax, two_stage_top_k

HEADS, KV_HEADS, DIM, BLOCK = 9, 3, 64, 16
BLOCKS = 32768
LAYERS = 4

# Query rows and context of each request.
ATTENTION_CASES: dict[str, list[tuple[int, int]]] = {
    "decode 64 x 256": [(1, 256)] * 64,
    "decode 64 x 2048": [(1, 2048)] * 64,
    "decode 1 x 2048": [(1, 2048)],
    "prompt 512 of 512": [(512, 512)],
    "prompt 512 of 1024": [(512, 1024)],
    "56 decodes + 256": [(1, 256)] * 56 + [(256, 256)],
}
LINEAR_SHAPES = [(49152, 576), (1536, 576), (576, 1536)]
LINEAR_ROWS = [1, 8, 16, 64, 256, 512]
VOCABULARY = 49152


class Spent(NamedTuple):
    """Milliseconds by the clock, and of all cores together."""

    wall: float
    cores: float

    def __truediv__(self, parts: int) -> "Spent":
        return Spent(self.wall / parts, self.cores / parts)

    def beside(self, ours: "Spent") -> str:
        return (
            f"{self.wall:8.3f} [{self.cores:8.3f}]"
            f" ({self.wall / ours.wall:5.1f}x [{self.cores / ours.cores:5.1f}x])"
        )

    def __str__(self) -> str:
        return f"{self.wall:8.3f} [{self.cores:8.3f}]"


def least(call: Callable[[], Any], seconds: float) -> Spent:
    """The shortest of the calls that fit in `seconds` (at least three), after one to warm up."""
    call()
    walls: list[float] = []
    cores: list[float] = []
    end = time.perf_counter() + seconds
    while len(walls) < 3 or time.perf_counter() < end:
        start, start_cores = time.perf_counter(), time.process_time()
        call()
        walls.append(time.perf_counter() - start)
        cores.append(time.process_time() - start_cores)
    return Spent(min(walls) * 1e3, min(cores) * 1e3)


class AttentionCase:
    """One batch with block tables for several layers, and pools that the layers share."""

    def __init__(self, lengths: list[tuple[int, int]], pools: list[jax.Array]) -> None:
        rng = np.random.default_rng(0)
        width = max(-(-context // BLOCK) for _, context in lengths)
        order, taken = rng.permutation(np.arange(1, BLOCKS)), 0
        self.tables = np.zeros((LAYERS, len(lengths), width), np.int32)
        for layer in range(LAYERS):
            for r, (_, context) in enumerate(lengths):
                count = -(-context // BLOCK)
                if taken + count > len(order):
                    taken = 0
                self.tables[layer, r, :count] = order[taken : taken + count]
                taken += count
        self.contexts = np.array([context for _, context in lengths], np.int32)
        self.starts = np.cumsum([0, *(rows for rows, _ in lengths)]).astype(np.int32)
        owner = np.repeat(np.arange(len(lengths)), np.diff(self.starts))
        position = np.concatenate([np.arange(c - n, c) for n, c in lengths])
        self.slots = self.tables[:, owner, position // BLOCK] * BLOCK + position % BLOCK
        tokens = len(owner)
        self.q = rng.standard_normal((tokens, HEADS, DIM), np.float32)
        self.k = rng.standard_normal((tokens, KV_HEADS, DIM), np.float32)
        self.v = rng.standard_normal((tokens, KV_HEADS, DIM), np.float32)
        self.decode = all(rows == 1 for rows, _ in lengths)
        self.pools = pools

    def program(self, impl: str) -> Callable[[], Any]:
        """LAYERS chained calls in one executable, run on the shared pools in place."""

        def step(k_pool: jax.Array, v_pool: jax.Array, *batch: jax.Array) -> Any:
            q, k, v, tables, contexts, starts, slots = batch
            out = q
            for layer in range(LAYERS):
                # Each layer's rows follow from the one before: else a write could overtake the
                # reads of another layer, which in a model has pools of its own.
                drift = 0.001 * out
                out, k_pool, v_pool = attend_and_write(
                    q + drift, k + drift[:, :KV_HEADS], v + drift[:, :KV_HEADS], k_pool, v_pool,
                    tables[layer], contexts, starts, slots[layer],
                    scale=DIM**-0.5, kv_dtype=jnp.bfloat16, decode=self.decode, impl=impl,
                )  # fmt: skip
            return out, k_pool, v_pool

        batch = [
            jnp.asarray(x)
            for x in (self.q, self.k, self.v, self.tables, self.contexts, self.starts, self.slots)
        ]
        run = jax.jit(step, donate_argnums=(0, 1)).lower(*self.pools, *batch).compile()

        def call() -> None:
            out, *self.pools[:] = run(*self.pools, *batch)
            out.block_until_ready()

        return call


def bench_attention(seconds: float, torch_python: str | None) -> None:
    rng = np.random.default_rng(1)
    piece = np.asarray(jnp.asarray(rng.standard_normal(1 << 20, np.float32), jnp.bfloat16))
    filled = np.resize(piece.view(np.uint16), (BLOCKS, KV_HEADS, BLOCK, DIM))
    pools = [jnp.asarray(filled), jnp.asarray(filled)]
    torch_ms = run_torch(torch_python, "attention")
    for name, lengths in ATTENTION_CASES.items():
        case = AttentionCase(lengths, pools)
        cpu, xla = (least(case.program(impl), seconds) / LAYERS for impl in ("cpu", "xla"))
        line = f"{name:18s} kernel {cpu}  xla {xla.beside(cpu)}"
        for kind, spent in torch_ms.get(name, {}).items():
            line += f"  torch {kind} {Spent(*spent).beside(cpu)}"
        print(line, flush=True)


def bench_linear(seconds: float, torch_python: str | None) -> None:
    rng = np.random.default_rng(0)
    torch_ms = run_torch(torch_python, "linear")
    for n, k in LINEAR_SHAPES:
        wide = jnp.asarray(rng.standard_normal((n, k), np.float32))
        for m in LINEAR_ROWS:
            if m * n > 256 * VOCABULARY:
                continue
            x = jnp.asarray(rng.standard_normal((m, k), np.float32))
            line = f"{n:6d} x {k:5d}, {m:4d} rows:"
            for kind in ("bfloat16", "float32"):
                w = wide.astype(kind)
                ours = jax.jit(functools.partial(linear, impl="ffi"))
                theirs = jax.jit(functools.partial(linear, impl="xla"))
                spent = least(functools.partial(_run, ours, x, w), seconds)
                other = least(functools.partial(_run, theirs, x, w), seconds)
                line += f"  {kind} kernel {spent}  xla {other.beside(spent)}"
                peer = torch_ms.get(f"{n} {k} {m} {kind}", {}).get("linear")
                if peer:
                    line += f"  torch {Spent(*peer).beside(spent)}"
            print(line, flush=True)


def bench_sampling(seconds: float) -> None:
    rng = np.random.default_rng(0)
    key = jax.random.key(0)
    for rows in (1, 8, 64):
        x = jnp.asarray(rng.standard_normal((rows, VOCABULARY), np.float32) * 3)
        u = jnp.asarray(rng.random(rows, np.float32))
        pairs: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
            "argmax": (lambda x, u: two_stage_argmax(x), lambda x, u: jnp.argmax(x, -1)),
            "top-k 50": (lambda x, u: two_stage_top_k(x, 50), lambda x, u: lax.top_k(x, 50)),
            "draw": (
                inverse_cdf_draw,
                lambda x, u: jnp.argmax(x + jax.random.gumbel(key, x.shape), -1),
            ),
        }
        for name, (ours, theirs) in pairs.items():
            fast, slow = (
                least(functools.partial(_run, jax.jit(f), x, u), seconds) for f in (ours, theirs)
            )
            print(
                f"{name:9s} {rows:3d} rows: two-stage {fast}  jax {slow.beside(fast)}", flush=True
            )


def decode_step(requests: int, context: int, kernels: bool) -> Callable[[], Any]:
    """One greedy decode step of the model with its pools donated, ready to be called."""
    hf = {
        "vocab_size": VOCABULARY, "hidden_size": HEADS * DIM, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "tie_word_embeddings": True, "rope_theta": 10000.0,
    }  # fmt: skip
    ops = Ops(activation_dtype=jnp.float32)
    if kernels:
        ops = Ops(functools.partial(linear, impl="ffi"), jnp.float32)
    config = llama_config(hf)
    model = LlamaForCausalLM(config, dtype=jnp.bfloat16, ops=ops, rngs=nnx.Rngs(0))
    graph, weights = nnx.split(model)
    width = -(-context // BLOCK)
    tables = jnp.arange(1, requests * width + 1, dtype=jnp.int32).reshape(requests, width)
    contexts = jnp.full(requests, context, jnp.int32)
    starts = jnp.arange(requests + 1, dtype=jnp.int32)
    slots = tables[:, -1] * BLOCK + (context - 1) % BLOCK

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, pools: Any, window: int | None) -> Any:
        out, *pools = attend_and_write(
            q, k, v, *pools, tables, contexts, starts, slots, scale=DIM**-0.5, window=window,
            kv_dtype=jnp.bfloat16, decode=True, impl="cpu" if kernels else "xla",
        )  # fmt: skip
        return out, pools

    def step(pools: Any, weights: Any, ids: jax.Array) -> Any:
        bound = nnx.merge(graph, weights)
        hidden, pools = bound.hidden(ids, contexts - 1, attend, pools)
        return two_stage_argmax(bound.logits(hidden)), pools

    shape = (requests * width + 1, KV_HEADS, BLOCK, DIM)
    pools = [[jnp.zeros(shape, jnp.uint16) for _ in range(2)] for _ in range(config.num_layers)]
    ids = jnp.arange(requests, dtype=jnp.int32)
    run = jax.jit(step, donate_argnums=0).lower(pools, weights, ids).compile()

    def call() -> None:
        nonlocal pools
        out, pools = run(pools, weights, ids)
        out.block_until_ready()

    return call


def bench_step(seconds: float) -> None:
    for requests in (1, 8, 64):
        ours, theirs = (least(decode_step(requests, 256, k), seconds) for k in (True, False))
        print(f"{requests:3d} requests: kernels {ours}  xla {theirs.beside(ours)}", flush=True)


def _run(f: Callable[..., Any], *arguments: jax.Array) -> None:
    jax.block_until_ready(f(*arguments))


def run_torch(python: str | None, what: str) -> dict[str, dict[str, list[float]]]:
    """The peer's milliseconds by case and kind, from torch_kernels.py run in its environment."""
    if python is None:
        return {}
    script = Path(__file__).with_name("torch_kernels.py")
    cases = json.dumps({"attention": ATTENTION_CASES, "linear": LINEAR_SHAPES, "rows": LINEAR_ROWS})
    done = subprocess.run([python, str(script), what, cases], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{script} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU kernels against XLA and torch")
    parser.add_argument("what", choices=["attention", "linear", "sampling", "step"])
    parser.add_argument("--seconds", type=float, default=0.5, help="time spent on each number")
    parser.add_argument("--torch-python", help="a Python that has torch")
    arguments = parser.parse_args()
    library = cpu_library.load()
    print(f"{library.instruction_set}, {os.cpu_count()} cores, jax {jax.__version__}", flush=True)
    match arguments.what:
        case "attention":
            bench_attention(arguments.seconds, arguments.torch_python)
        case "linear":
            bench_linear(arguments.seconds, arguments.torch_python)
        case "sampling":
            bench_sampling(arguments.seconds)
        case "step":
            bench_step(arguments.seconds)


if __name__ == "__main__":
    main()
