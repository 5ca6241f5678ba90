"""`jaxllm bench sweep`: a server per token budget, a load test per concurrency.

Small budgets keep the gaps between tokens short and make first tokens wait; large ones do the
reverse. More concurrency buys throughput with latency. The plots show both trades.
"""

import argparse
import asyncio
import csv
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import ConfigError
from serving.bench import arguments as flags
from serving.bench import client, metrics, report
from serving.bench.arrivals import arrival_times
from serving.bench.datasets import BenchRequest
from serving.bench.load import run_load
from serving.bench.plots import write_plots
from serving.bench.server_process import running, serve_command

COLUMNS = {
    "max_num_batched_tokens": "token budget",
    "max_concurrency": "concurrency",
    "output_throughput": "output tok/s",
    "total_token_throughput": "tok/s",
    "median_ttft_ms": "TTFT p50, ms",
    "p99_ttft_ms": "TTFT p99, ms",
    "median_itl_ms": "ITL p50, ms",
    "p99_itl_ms": "ITL p99, ms",
    "median_e2el_ms": "E2E p50, ms",
    "failed": "failed",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags of `bench sweep`; what comes after -- goes to the server."""
    parser.add_argument(
        "--max-num-batched-tokens",
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="token budgets (default: the server's own)",
    )
    parser.add_argument(
        "--max-concurrency", type=int, nargs="+", required=True, metavar="N", help="concurrencies"
    )
    parser.add_argument("--num-runs", type=int, default=1, help="of each; the median counts")
    parser.add_argument("--num-warmups", type=int, default=4, help="requests before each (4)")
    parser.add_argument("--output-dir", type=Path, required=True, help="for tables and plots")
    parser.add_argument("--serve-cmd", help="instead of 'jaxllm serve'")
    parser.add_argument("--server-ready-timeout", type=float, default=600.0, help="default: 600 s")
    parser.add_argument("--backend", choices=tuple(client.BACKENDS), default="openai")
    parser.add_argument("--tokenizer", help="default: where the model came from")
    parser.add_argument("--skip-tokenizer-init", action="store_true", help="see bench serve")
    flags.add_dataset_arguments(parser, num_prompts=64)
    flags.add_sampling_arguments(parser)
    parser.add_argument(
        "serve_args", nargs="*", metavar="SERVE_ARG", help="after --, for the server: its model ..."
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes sweep.json, sweep.csv, sweep.md and the plots; prints the table."""
    if min(arguments.max_concurrency) < 1 or arguments.num_runs < 1:
        raise ConfigError("--max-concurrency and --num-runs: must be at least 1")
    rows: list[dict[str, Any]] = []
    budgets: list[int | None] = arguments.max_num_batched_tokens or [None]
    for budget in budgets:
        command = [*serve_command(arguments.serve_cmd), *arguments.serve_args, "--port=0"]
        if budget is not None:
            command.append(f"--max-num-batched-tokens={budget}")
        with running(command, arguments.server_ready_timeout) as server:
            rows += asyncio.run(_measure(arguments, server.url or "", budget))
    folder = arguments.output_dir
    report.write_json(folder / "sweep.json", {"rows": rows})
    table = report.markdown(rows, COLUMNS)
    (folder / "sweep.md").write_text(table, encoding="utf-8")
    with (folder / "sweep.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
    paths = write_plots(rows, folder)
    print(table, end="")
    print("wrote", ", ".join(map(str, [folder / "sweep.json", *paths])), file=sys.stderr)
    return int(any(row["failed"] for row in rows))


async def _measure(
    arguments: argparse.Namespace, url: str, budget: int | None
) -> list[dict[str, Any]]:
    headers = client.default_headers()
    async with client.new_session() as session:
        model, root = await client.first_model(session, url, headers, 0.0)
    target = client.Target(
        url,
        arguments.backend,
        client.BACKENDS[arguments.backend],
        model,
        headers,
        flags.request_fields(arguments),
    )
    tokenizer = None
    if not arguments.skip_tokenizer_init:
        tokenizer = flags.open_tokenizer(arguments.tokenizer or root)
    rows = []
    seeds = itertools.count(arguments.seed)
    for concurrency in arguments.max_concurrency:
        runs = []
        for _ in range(arguments.num_runs):
            # New prompts each time, or the prefix cache would answer.
            requests = flags.requests_from(arguments, tokenizer, next(seeds))
            runs.append(await _run(target, requests, concurrency, arguments.num_warmups))
        row: dict[str, Any] = {
            "max_num_batched_tokens": budget if budget is not None else "default",
            "max_concurrency": concurrency,
        }
        for name in runs[0]:
            if runs[0][name] is not None:
                row[name] = float(np.median([figures[name] for figures in runs]))
        row["failed"] = int(sum(figures["failed"] for figures in runs))
        rows.append(row)
    return rows


async def _run(
    target: client.Target, requests: list[BenchRequest], concurrency: int, num_warmups: int
) -> dict[str, Any]:
    arrivals = arrival_times(len(requests), np.inf, 1.0, np.random.default_rng(0))
    timelines, duration = await run_load(
        target, requests, arrivals, max_concurrency=concurrency, num_warmups=num_warmups
    )
    return metrics.summarise(timelines, duration, percentiles=(50.0, 90.0, 99.0))
