"""`jaxllm bench latency`: one batch of equal requests, again and again."""

import argparse
import time
from pathlib import Path

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from serving.bench import report
from serving.bench.engine_arguments import add_engine_arguments, engine_config, start

PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags of `bench latency`."""
    for name, default, text in (
        ("input-len", 32, "prompt tokens"),
        ("output-len", 128, "output tokens"),
        ("batch-size", 8, "requests at once"),
        ("n", 1, "samples per prompt"),
        ("num-iters-warmup", 10, "batches before"),
        ("num-iters", 30, "batches that are timed"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{text} (default: {default})"
        )
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: 0)")
    parser.add_argument("--disable-detokenize", action="store_true", help="tokens only")
    parser.add_argument("--output-json", type=Path, help="file for the result")
    # A batch that finds its prompts in the cache would time something else.
    add_engine_arguments(parser, enable_prefix_caching=False)


def run(arguments: argparse.Namespace) -> int:
    """Prints the mean and percentiles of a batch's time."""
    for name in ("input_len", "output_len", "batch_size", "n", "num_iters"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"{name}={getattr(arguments, name)}: must be at least 1")
    llm = start(arguments)
    random = np.random.default_rng(arguments.seed)
    shape = (arguments.batch_size, arguments.input_len)
    prompts = random.integers(0, llm.get_tokenizer().vocab_size, shape).tolist()
    params = SamplingParams(
        n=arguments.n,
        temperature=1.0,
        ignore_eos=True,
        max_tokens=arguments.output_len,
        detokenize=not arguments.disable_detokenize,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    latencies = []
    for index in range(arguments.num_iters_warmup + arguments.num_iters):
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        if index >= arguments.num_iters_warmup:
            latencies.append(time.perf_counter() - began)
    percentiles = {str(p): float(np.percentile(latencies, p)) for p in PERCENTILES}
    result = {
        "model_id": engine_config(arguments).model,
        "avg_latency": float(np.mean(latencies)),
        "latencies": latencies,
        "percentiles": percentiles,
    }
    spread = ", ".join(f"p{p} {value:.4f}" for p, value in percentiles.items())
    print(f"seconds per batch: mean {result['avg_latency']:.4f}, {spread}")
    if arguments.output_json is not None:
        report.write_json(arguments.output_json, result)
    return 0
