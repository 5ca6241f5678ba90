"""`jaxllm bench throughput`: the engine alone, all requests at once."""

import argparse
import time
from pathlib import Path

from jaxllm.errors import ConfigError
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from serving.bench import report
from serving.bench.arguments import add_dataset_arguments, requests_from
from serving.bench.engine_arguments import add_engine_arguments, engine_config, start


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags of `bench throughput`."""
    add_dataset_arguments(parser)
    parser.add_argument("--n", type=int, default=1, help="samples per prompt (default: 1)")
    parser.add_argument("--num-warmups", type=int, default=1, help="requests before (default: 1)")
    parser.add_argument("--disable-detokenize", action="store_true", help="tokens only")
    parser.add_argument("--output-json", type=Path, help="file for the result")
    add_engine_arguments(parser, enable_prefix_caching=False)


def run(arguments: argparse.Namespace) -> int:
    """Prints requests and tokens per second."""
    if arguments.n < 1:
        raise ConfigError(f"--n {arguments.n}: must be at least 1")
    llm = start(arguments)
    tokenizer = llm.get_tokenizer()
    requests = requests_from(arguments, tokenizer)
    # Tokenising is not what is measured.
    prompts = [tokenizer.encode(request.prompt) for request in requests]
    params = [
        SamplingParams(
            n=arguments.n,
            temperature=1.0,
            ignore_eos=True,
            max_tokens=request.output_len,
            detokenize=not arguments.disable_detokenize,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for request in requests
    ]
    if arguments.num_warmups > 0:
        count = min(arguments.num_warmups, len(prompts))
        llm.generate(prompts[:count], params[:count], use_tqdm=False)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=not arguments.quiet)
    elapsed = time.perf_counter() - began
    num_output = sum(len(c.token_ids) for output in outputs for c in output.outputs)
    num_prompt = sum(len(prompt) for prompt in prompts)
    result = {
        "model_id": engine_config(arguments).model,
        "elapsed_time": elapsed,
        "num_requests": len(requests),
        "total_num_tokens": num_prompt + num_output,
        "requests_per_second": len(requests) / elapsed,
        "tokens_per_second": (num_prompt + num_output) / elapsed,
        "total_output_tokens": num_output,
        "output_tokens_per_second": num_output / elapsed,
    }
    print(
        f"{result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} tokens/s in all, "
        f"{result['output_tokens_per_second']:.2f} output tokens/s"
    )
    if arguments.output_json is not None:
        report.write_json(arguments.output_json, result)
    return 0
