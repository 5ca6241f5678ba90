"""Decode throughput with a JSON schema on every request, beside the same batch without.

    python -m benchmarks.structured_output [--model smollm2] [--requests 64] [--tokens 24]

Both batches have the same prompts, the same number of sampling rows and the same length: the
schema's string cannot end before `--tokens`, and the plain batch ignores ends. Rates are counted
from the moment when every request has its first token, by the clock and by the time of all cores
together, which other processes disturb less. Runs alternate, and ratios are those of the medians.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxllm import LLM, SamplingParams, StructuredOutputs

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 2, "maxItems": 3},
        "story": {"type": "string", "minLength": 400},
    },
    "required": ["name", "age", "tags", "story"],
    "additionalProperties": False,
}


def decode_rate(llm: LLM, num_requests: int, params: list[SamplingParams]) -> tuple[float, float]:
    """Tokens per second, and per second of a core, of the steps in which all requests decode."""
    prompts = [f"Person {i}, as JSON:\n" for i in range(num_requests)]
    llm.reset_prefix_cache()
    started: set[str] = set()
    begin, begin_cores, counted, end, end_cores = 0.0, 0.0, 0, 0.0, 0.0
    for output in llm.stream(prompts, params):
        if len(started) == num_requests:
            counted += 1
            end, end_cores = time.perf_counter(), time.process_time()
        elif output.request_id not in started:
            started.add(output.request_id)
            begin, begin_cores = time.perf_counter(), time.process_time()
    return counted / (end - begin), counted / (end_cores - begin_cores)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    llm = LLM(
        options.model, dtype=options.dtype, max_model_len=512, max_num_seqs=options.requests,
        max_num_batched_tokens=2 * options.requests, enforce_eager=True, progress=False,
    )  # fmt: skip
    kinds = {"plain": None, "schema": StructuredOutputs(json=SCHEMA)}
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for repeat in range(options.repeats + 1):
        for name, constraint in kinds.items():
            params = [
                SamplingParams(
                    temperature=options.temperature, max_tokens=options.tokens, ignore_eos=True,
                    seed=i, structured_outputs=constraint,
                )
                for i in range(options.requests)
            ]  # fmt: skip
            rate = decode_rate(llm, options.requests, params)
            # The first of each compiles.
            if repeat:
                rates[name].append(rate)
    for i, unit in enumerate(("tokens/s", "tokens per second of a core")):
        medians = {}
        for name, values in rates.items():
            chosen = [value[i] for value in values]
            medians[name] = statistics.median(chosen)
            print(f"{name:8}" + "  ".join(f"{value:.1f}" for value in chosen) + f" {unit}")
        print(f"schema / plain: {medians['schema'] / medians['plain']:.3f}")


if __name__ == "__main__":
    main()
