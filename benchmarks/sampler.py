"""What sampling costs per step, by kind of batch: host and device, beside the forward pass.

    python -m benchmarks.sampler [--rows 64] [--vocab 49152 151936] [--seconds 1]

Every kind is what the engine runs after `logits` for a batch whose rows are all of that kind: the
packing of edits on the host, the mask and edit programs, the draw, the log probabilities. Logits
follow a power law by rank, as those of language models do about: "peaked" falls with the square of
the rank (half of the mass on one token), "flat" with the rank itself, so that 90 % of the mass is
thousands of tokens. Times are the least of many calls, in milliseconds: by the clock, and in
brackets the time of all cores together, which other processes disturb less.
"""

import argparse
import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cpu_kernels import Spent, least
from jaxllm.engine.request import Request
from jaxllm.execution.batch import GREEDY, RANDOM, TRUNCATED, SamplingFields
from jaxllm.execution.logit_edits import RowEdits, apply_entries, apply_mask, pack_edits
from jaxllm.execution.logprobs import all_logprobs, token_logprobs
from jaxllm.execution.sampler import sample
from jaxllm.sampling_params import SamplingParams

OUTPUT_TOKENS = 200
MAX_LEN = 2048
EXPONENTS = {"peaked": 2.0, "flat": 1.0}


class HalfOfTheVocabulary:
    """A grammar that allows every other token: the mask is there, computing it costs nothing."""

    def __init__(self, words: int):
        self.row = np.full(words, 0x55555555, np.int32)
        self.is_terminated = False

    @property
    def filler(self) -> "HalfOfTheVocabulary":
        return self

    def fill_masks(self, states: Any, rows: Any, out: np.ndarray) -> dict[int, ValueError]:
        out[rows] = self.row
        return {}

    def accept(self, token_id: int) -> bool:
        return True


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A kind of batch: the parameters of its rows."""

    name: str
    need: int
    options: dict[str, Any]
    grammar: bool = False
    logprobs: int | None = None


KINDS = [
    Kind("greedy", GREEDY, {"temperature": 0}),
    Kind("random", RANDOM, {}),
    Kind("top-k 50", TRUNCATED, {"top_k": 50}),
    Kind("top-k 1000", TRUNCATED, {"top_k": 1000}),
    Kind("top-p 0.9", TRUNCATED, {"top_p": 0.9}),
    Kind("min-p 0.05", TRUNCATED, {"min_p": 0.05}),
    Kind("greedy, penalties", GREEDY, {"temperature": 0, "frequency_penalty": 0.5}),
    Kind("greedy, 300 biased tokens", GREEDY,
         {"temperature": 0, "logit_bias": dict.fromkeys(range(300), 1.0)}),
    Kind("greedy, grammar mask", GREEDY, {"temperature": 0}, grammar=True),
    Kind("greedy, 20 logprobs", GREEDY, {"temperature": 0}, logprobs=20),
    Kind("greedy, all logprobs", GREEDY, {"temperature": 0}, logprobs=-1),
]  # fmt: skip


def random_logits(rows: int, vocab: int, exponent: float) -> jax.Array:
    """float32 [rows, vocab]: a power law by rank, in a random order of tokens per row."""
    rng = np.random.default_rng(0)
    falling = (-exponent * np.log(np.arange(1, vocab + 1))).astype(np.float32)
    return jnp.asarray(np.stack([rng.permutation(falling) for _ in range(rows)]))


def step_of(kind: Kind, logits: jax.Array) -> Callable[[], Any]:
    """A call that does all of one step's sampling."""
    rows, vocab = logits.shape
    rng = np.random.default_rng(1)
    params = SamplingParams(max_tokens=None, ignore_eos=True, **kind.options)
    edits: list[RowEdits | None] = []
    for row in range(rows):
        grammar = HalfOfTheVocabulary(-(-vocab // 32)) if kind.grammar else None
        ids = rng.integers(vocab, size=OUTPUT_TOKENS).tolist()
        request = Request(str(row), ids[:1], params, max_model_len=MAX_LEN, grammar=grammar)
        request.token_ids += ids[1:]
        plain = not (params.penalizes or params.logit_bias or grammar)
        edits.append(None if plain else RowEdits(request, vocab))

    def bits(value: float) -> np.ndarray:
        return np.full(rows, value, np.float32).view(np.int32)

    fields = SamplingFields(
        rows=np.arange(rows, dtype=np.int32),
        slots=np.arange(rows, dtype=np.int32),
        uniform=rng.random(rows).astype(np.float32).view(np.int32),
        temperature=bits(params.temperature),
        top_k=np.full(rows, params.top_k, np.int32),
        top_p=bits(params.top_p),
        min_p=bits(params.min_p),
    )
    columns = [jnp.asarray(getattr(fields, field.name)) for field in dataclasses.fields(fields)]
    draw = jax.jit(lambda logits, columns: sample(logits, SamplingFields(*columns), kind.need))
    mask, entries = jax.jit(apply_mask), jax.jit(apply_entries, static_argnums=0)
    top = jax.jit(functools.partial(token_logprobs, max(kind.logprobs or 1, 1)))
    everything = jax.jit(all_logprobs)

    def call() -> Any:
        edited = logits
        packed = pack_edits(edits, rows, MAX_LEN, vocab)
        if packed.mask is not None:
            edited = mask(edited, packed.mask)
        if packed.entries is not None:
            edited = entries(packed.num_entries, edited, packed.entries)
        ids, floors = draw(edited, columns)
        results = [ids, floors]
        if kind.logprobs is not None:
            results += top(logits, ids)
            if kind.logprobs < 0:
                results.append(everything(logits))
        return jax.block_until_ready(results)

    return call


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument("--seconds", type=float, default=1.0, help="of calls per figure")
    options = parser.parse_args()
    columns = [(vocab, shape) for vocab in options.vocab for shape in EXPONENTS]
    print(f"{options.rows} rows; ms by the clock [of all cores]")
    print(f"{'':26}" + "".join(f"{f'{vocab} {shape}':>22}" for vocab, shape in columns))
    spent: dict[str, list[Spent]] = {kind.name: [] for kind in KINDS}
    for vocab, shape in columns:
        logits = random_logits(options.rows, vocab, EXPONENTS[shape])
        for kind in KINDS:
            spent[kind.name].append(least(step_of(kind, logits), options.seconds))
    for name, row in spent.items():
        print(f"{name:26}" + "".join(f"{value!s:>22}" for value in row))


if __name__ == "__main__":
    main()
