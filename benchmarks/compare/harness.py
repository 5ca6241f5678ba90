"""What the engine scripts share: their command line, the clock, and the lines they print.

    python -m benchmarks.compare.engine_NAME --model DIR --workload throughput

prints one JSON line per timed run. With ``--serve`` the engine stays up and reads lines of a
workload and the number of a round from standard input, so that ``run.py`` can let engines take
turns without starting each anew. Anything else the engine prints goes to standard error.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO

from benchmarks.compare.workloads import SETUPS, WORKLOADS, Workload, digest


class Engine(Protocol):
    """An engine that is up."""

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Greedy, `new_tokens` for each prompt whatever they are; the new ids."""

    def info(self) -> dict[str, Any]:
        """Versions and threads."""


# Of a workload, what an untimed run takes: every kind of work, but not the minutes of a whole run.
WARMUP_REQUESTS, WARMUP_TOKENS = 2, 8


def cores() -> list[int]:
    """The cores this process may use."""
    return sorted(os.sched_getaffinity(0))


def measure(
    engine: Engine,
    args: argparse.Namespace,
    workload: Workload,
    startup: float,
    round_number: int = 0,
) -> dict[str, Any]:
    """One timed run, as the JSON object to print.

    Raises:
        RuntimeError: the engine gave fewer or more tokens than asked.
    """
    prompts = workload.prompts(round_number)
    begin = time.perf_counter()
    outputs = engine.generate(prompts, workload.new_tokens)
    seconds = time.perf_counter() - begin
    wrong = [len(ids) for ids in outputs if len(ids) != workload.new_tokens]
    if wrong or len(outputs) != len(prompts):
        raise RuntimeError(
            f"{args.name}: {len(outputs)} outputs for {len(prompts)} prompts, "
            f"of {sorted(set(wrong))} tokens where {workload.new_tokens} were asked"
        )
    output_tokens = sum(len(ids) for ids in outputs)
    return {
        "engine": args.name,
        "dtype": args.dtype,
        "workload": workload.name,
        "round": round_number,
        "requests": len(prompts),
        "prompt_tokens": sum(len(ids) for ids in prompts),
        "output_tokens": output_tokens,
        "seconds": round(seconds, 4),
        "tok_per_s": round(output_tokens / seconds, 2),
        "startup_s": round(startup, 2),
        "prompts_digest": digest(prompts),
        "outputs_digest": digest(outputs),
        "outputs": outputs,
        "cores": cores(),
        **engine.info(),
    }


def main(name: str, start: Callable[[argparse.Namespace], Engine], doc: str) -> None:
    """The command line of an engine script."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--model", required=True, help="Hugging Face folder, bfloat16 weights")
    parser.add_argument("--name", default=name, help="what to call the engine in the output")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="throughput")
    parser.add_argument("--setup", choices=list(SETUPS), help="default: that of the workload")
    parser.add_argument("--warmup", type=int, default=1, help="short untimed runs before the first")
    parser.add_argument("--runs", type=int, default=1, help="timed runs")
    parser.add_argument("--serve", action="store_true", help="take workload names from stdin")
    parser.add_argument("--outputs", action="store_true", help="print the generated ids too")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--enforce-eager", action="store_true", help="no compilation at start-up")
    parser.add_argument("--bind", choices=["all", "auto"], default="all", help="vLLM's cores")
    args = parser.parse_args()
    args.setup = SETUPS[args.setup or WORKLOADS[args.workload].setup]
    lines = _own_stdout()
    begin = time.perf_counter()
    engine = start(args)
    startup = time.perf_counter() - begin
    warm: set[str] = set()

    def run(workload: Workload, round_number: int) -> None:
        if workload.name not in warm:
            short = dataclasses.replace(
                workload,
                requests=min(workload.requests, WARMUP_REQUESTS),
                new_tokens=min(workload.new_tokens, WARMUP_TOKENS),
            )
            for i in range(args.warmup):
                measure(engine, args, short, startup, -1 - i)
            warm.add(workload.name)
        result = measure(engine, args, workload, startup, round_number)
        if not args.outputs:
            del result["outputs"]
        print(json.dumps(result), file=lines, flush=True)

    if not args.serve:
        for i in range(args.runs):
            run(WORKLOADS[args.workload], i)
        return
    print(json.dumps({"ready": args.name, "startup_s": round(startup, 2)}), file=lines, flush=True)
    for line in sys.stdin:
        name, round_number = line.split()
        run(WORKLOADS[name], int(round_number))


def _own_stdout() -> TextIO:
    """Standard output for our lines alone; the engine and its children print to stderr."""
    ours = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return ours
