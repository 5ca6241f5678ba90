"""`jaxllm bench serve`: load on a running server, from outside."""

import argparse
import asyncio
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxllm.errors import ConfigError
from serving.bench import arguments as flags
from serving.bench import client, metrics, report
from serving.bench.arrivals import arrival_times
from serving.bench.load import run_load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags of `bench serve`."""
    group = parser.add_argument_group("server")
    group.add_argument("--base-url", help="instead of --host and --port")
    group.add_argument("--host", default="127.0.0.1")
    group.add_argument("--port", type=int, default=8000)
    group.add_argument("--backend", choices=tuple(client.BACKENDS), default="openai")
    group.add_argument("--endpoint", help="default: /v1/completions, or /v1/chat/completions")
    group.add_argument("--header", nargs="*", default=[], metavar="KEY=VALUE")
    group.add_argument("--insecure", action="store_true", help="do not check certificates")
    group.add_argument("--model", help="name of the model (default: the server's first)")
    group.add_argument("--served-model-name", help="name in requests, where --model is a path")
    group.add_argument(
        "--tokenizer", help="folder, hub id or .gguf file (default: where the model came from)"
    )
    group.add_argument(
        "--skip-tokenizer-init",
        action="store_true",
        help="no tokenizer here: random text is of words, and only the server counts tokens",
    )
    group.add_argument(
        "--ready-check-timeout-sec", type=float, default=0.0, help="wait for the server (default 0)"
    )
    group = parser.add_argument_group("load")
    group.add_argument("--max-concurrency", type=int, help="most requests open at once")
    group.add_argument(
        "--request-rate", type=float, default=math.inf, help="requests/s (default: all at once)"
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        help="shape of the gaps' gamma distribution; 1 (default) is a Poisson process",
    )
    group.add_argument("--num-warmups", type=int, default=0, help="requests before the test")
    group.add_argument("--request-id-prefix", default="bench-")
    flags.add_dataset_arguments(parser)
    flags.add_sampling_arguments(parser)
    group = parser.add_argument_group("results")
    group.add_argument("--percentile-metrics", default="ttft,tpot,itl", help="default: %(default)s")
    group.add_argument("--metric-percentiles", default="99", help="default: 99")
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS", help="such as ttft:200 tpot:50"
    )
    group.add_argument("--label", help="name of the result (default: the backend)")
    group.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE")
    group.add_argument("--save-result", action="store_true", help="write a JSON file")
    group.add_argument("--save-detailed", action="store_true", help="with a value per request")
    group.add_argument("--append-result", action="store_true", help="a further line of JSON")
    group.add_argument("--result-dir", type=Path)
    group.add_argument("--result-filename")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace) -> int:
    """Runs the test and prints its figures; 1 if no request was answered."""
    result = asyncio.run(measure(arguments))
    print(report.render(result))
    for error in dict.fromkeys(error for error in result["errors"] if error):
        print(f"failed: {error}", file=sys.stderr)
    if arguments.save_result or arguments.append_result:
        path = report.result_path(
            arguments.result_dir,
            arguments.result_filename,
            label=result["label"],
            rate=arguments.request_rate,
            max_concurrency=arguments.max_concurrency,
            model=result["model_id"],
        )
        if not arguments.save_detailed:
            result = {k: v for k, v in result.items() if k not in metrics.details([])}
        report.write_json(path, result, append=arguments.append_result)
        print(f"\nwrote {path}")
    return int(not result["completed"])


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of a test, and a value per request.

    Raises:
      ConfigError: a flag, the data set or the server cannot be used.
    """
    # What can be wrong with the flags is said before a server is asked.
    percentile_metrics = metrics.parse_metrics(arguments.percentile_metrics)
    percentiles = metrics.parse_percentiles(arguments.metric_percentiles)
    goodput = metrics.parse_goodput(arguments.goodput)
    metadata = _pairs("--metadata", arguments.metadata)
    if arguments.max_concurrency is not None and arguments.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency {arguments.max_concurrency}: must be at least 1")
    flags.check_num_prompts(arguments)
    arrivals = arrival_times(
        arguments.num_prompts,
        arguments.request_rate,
        arguments.burstiness,
        np.random.default_rng(arguments.seed),
    )
    target, root = await _find_target(arguments)
    tokenizer_name = None if arguments.skip_tokenizer_init else arguments.tokenizer or root
    tokenizer = None if tokenizer_name is None else flags.open_tokenizer(tokenizer_name)
    requests = flags.requests_from(arguments, tokenizer)
    bar = tqdm(
        total=len(requests), unit="request", disable=arguments.disable_tqdm or _is_quiet(arguments)
    )
    timelines, duration = await run_load(
        target,
        requests,
        arrivals,
        max_concurrency=arguments.max_concurrency,
        num_warmups=arguments.num_warmups,
        request_id_prefix=arguments.request_id_prefix,
        on_done=bar.update,
    )
    bar.close()
    figures = metrics.summarise(
        timelines,
        duration,
        percentile_metrics=percentile_metrics,
        percentiles=percentiles,
        goodput=goodput,
    )
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": arguments.backend,
        "backend": arguments.backend,
        "label": arguments.label or arguments.backend,
        "model_id": target.model,
        "tokenizer_id": tokenizer_name,
        "num_prompts": arguments.num_prompts,
        **metadata,
        "request_rate": arguments.request_rate,
        "burstiness": arguments.burstiness,
        "max_concurrency": arguments.max_concurrency,
        **figures,
        **metrics.details(timelines),
    }


async def _find_target(arguments: argparse.Namespace) -> tuple[client.Target, str]:
    """The target, and what to load a tokenizer from."""
    base_url = (arguments.base_url or f"http://{arguments.host}:{arguments.port}").rstrip("/")
    headers = {**client.default_headers(), **_pairs("--header", arguments.header)}
    model, root = arguments.served_model_name or arguments.model, arguments.model
    if root is None or arguments.ready_check_timeout_sec > 0:
        async with client.new_session(arguments.insecure) as session:
            found, its_root = await client.first_model(
                session, base_url, headers, arguments.ready_check_timeout_sec
            )
        model, root = model or found, root or its_root
    target = client.Target(
        base_url=base_url,
        backend=arguments.backend,
        endpoint=arguments.endpoint or client.BACKENDS[arguments.backend],
        model=model,
        headers=headers,
        body=flags.request_fields(arguments),
        insecure=arguments.insecure,
    )
    return target, root


def _pairs(flag: str, entries: list[str]) -> dict[str, str]:
    pairs = {}
    for entry in entries:
        key, equals, value = entry.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{flag} {entry!r}: must be KEY=VALUE")
        pairs[key.strip()] = value.strip()
    return pairs


def _is_quiet(arguments: argparse.Namespace) -> bool:
    return bool(getattr(arguments, "quiet", False))
