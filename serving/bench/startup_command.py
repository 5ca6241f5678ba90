"""`jaxllm bench startup`: from the start of the server's process to its first token.

Cold starts have an empty folder of compiled programs, warm ones the folder of the start before. The
page cache is left alone: weights are read from memory in both.
"""

import argparse
import dataclasses
import json
import re
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import ConfigError
from serving.bench import report
from serving.bench.client import TargetError
from serving.bench.latency_command import PERCENTILES
from serving.bench.server_process import ServerProcess, serve_command

PHASES = {
    "api_process": "API process: interpreter, imports, socket",
    "engine_process": "engine process: interpreter, imports, configuration, sizing",
    "weights": "weights",
    "compilation": "programs compiled, or read from the cache",
    "pool": "KV pool, tokenizer, ready",
    "first_token": "first request",
}
_SIZED = re.compile(r"KV pool: ")
_COMPILED = re.compile(r"programs ready in ([\d.]+) s: (\d+) compiled")


@dataclasses.dataclass(frozen=True, slots=True)
class Startup:
    """One start, in seconds.

    Attributes:
      total: from the start of the process to the first token.
      ready: to the first 200 of /health.
      phases: by the names of PHASES, in order.
      num_compiled: programs that no cache had.
    """

    total: float
    ready: float
    phases: dict[str, float]
    num_compiled: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags of `bench startup`; what is not known to it goes to `jaxllm serve`."""
    parser.add_argument("--num-iters-cold", type=int, default=3, help="default: 3")
    parser.add_argument(
        "--num-iters-warmup", type=int, default=1, help="untimed, to fill the cache (1)"
    )
    parser.add_argument("--num-iters-warm", type=int, default=3, help="default: 3")
    parser.add_argument("--output-json", type=Path, help="file for the result")
    parser.add_argument("--serve-cmd", help="instead of 'jaxllm serve'")
    parser.add_argument("--server-ready-timeout", type=float, default=600.0, help="default: 600 s")
    parser.add_argument(
        "serve_args", nargs="*", metavar="SERVE_ARG", help="after --, for the server: its model ..."
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the phases of cold and warm starts."""
    if arguments.num_iters_cold < 1 or arguments.num_iters_warm < 1:
        raise ConfigError("--num-iters-cold and --num-iters-warm: must be at least 1")
    command = [*serve_command(arguments.serve_cmd), *arguments.serve_args, "--port=0"]

    def start(cache: str) -> Startup:
        return measure(command, cache, arguments.server_ready_timeout)

    cold, warm = [], []
    for _ in range(arguments.num_iters_cold):
        with tempfile.TemporaryDirectory(prefix="jaxllm-bench-") as cache:
            cold.append(start(cache))
    with tempfile.TemporaryDirectory(prefix="jaxllm-bench-") as cache:
        for _ in range(max(1, arguments.num_iters_warmup)):
            start(cache)
        warm = [start(cache) for _ in range(arguments.num_iters_warm)]
    result = summarise(cold, warm)
    columns = {"phase": "phase, mean seconds", "cold": "cold", "warm": "warm"}
    print(report.markdown(_rows(result), columns), end="")
    if arguments.output_json is not None:
        report.write_json(arguments.output_json, result)
    return 0


def measure(command: Sequence[str], cache: str, timeout: float) -> Startup:
    """Starts a server with its compiled programs in `cache`, asks for a token, and ends it.

    Raises:
      TargetError: it did not get ready, or did not answer.
    """
    server = ServerProcess(command, {"JAX_COMPILATION_CACHE_DIR": cache})
    try:
        ready = server.wait_ready(timeout)
        _first_token(server.url or "")
        done = time.monotonic()
    finally:
        server.end()
    phases, num_compiled = split(server.lines, server.began, ready, done)
    return Startup(done - server.began, ready - server.began, phases, num_compiled)


def split(
    lines: Sequence[tuple[float, str]], began: float, ready: float, done: float
) -> tuple[dict[str, float], int]:
    """Phases of a start from the moments at which the server wrote its lines, and how many programs
    were compiled. A phase that left no line is part of the next one."""
    marks: dict[str, float] = {}
    num_compiled = 0
    for moment, text in lines:
        compiled = _COMPILED.search(text)
        if "listening at " in text:
            marks.setdefault("api_process", moment)
        elif _SIZED.search(text):
            marks["engine_process"] = moment
        elif compiled:
            # The line comes at the end of its phase and tells when that began.
            marks["weights"] = moment - float(compiled[1])
            marks["compilation"] = moment
            num_compiled += int(compiled[2])
    marks["pool"], marks["first_token"] = ready, done
    phases, last = dict.fromkeys(PHASES, 0.0), began
    for name in PHASES:
        # The server rounds what it tells to a tenth of a second.
        moment = max(last, min(marks.get(name, last), done))
        phases[name] = moment - last
        last = moment
    return phases, num_compiled


def summarise(cold: Sequence[Startup], warm: Sequence[Startup]) -> dict[str, Any]:
    """Means, values and percentiles under vLLM's names, and the mean of each phase."""
    result: dict[str, Any] = {}
    for kind, starts in (("cold", cold), ("warm", warm)):
        values: Mapping[str, list[float]] = {
            f"{kind}_startup": [start.total for start in starts],
            f"{kind}_compilation": [start.phases["compilation"] for start in starts],
            f"{kind}_ready": [start.ready for start in starts],
        }
        for key, seconds in values.items():
            result[f"avg_{key}_time"] = float(np.mean(seconds))
            result[f"{key}_times"] = seconds
            result[f"{key}_percentiles"] = {
                str(p): float(np.percentile(seconds, p)) for p in PERCENTILES
            }
        result[f"{kind}_phases"] = {
            name: float(np.mean([start.phases[name] for start in starts])) for name in PHASES
        }
        result[f"{kind}_num_compiled"] = [start.num_compiled for start in starts]
    return result


def _rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {
            "phase": title,
            "cold": result["cold_phases"][name],
            "warm": result["warm_phases"][name],
        }
        for name, title in PHASES.items()
    ]
    total = {kind: result[f"avg_{kind}_startup_time"] for kind in ("cold", "warm")}
    return [*rows, {"phase": "start to first token", **total}]


def _first_token(url: str) -> None:
    body = json.dumps({"prompt": "Hello", "max_tokens": 1, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            reply.read()
    except OSError as error:
        raise TargetError(f"{url} is ready and does not answer: {error}") from None
