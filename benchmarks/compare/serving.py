"""Servers in turns: time to the first healthy answer, cold and warm, and one client for all.

    python -m benchmarks.compare.serving --peers PEERS --model MODELS/smollm2-bf16 --out results

Every server starts twice with a cache folder of its own: the first start is cold, the second finds
what the first compiled. Start-up is from the start of the process to the first 200 of /health. Then
`jaxllm bench serve` loads one server at a time at each concurrency, round after round, while the
others are stopped (SIGSTOP). Weights are in the page cache in all starts but perhaps the first.
"""

import argparse
import dataclasses
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.compare import process_group
from benchmarks.compare.engine_vllm import PRELOADS, preloaded
from benchmarks.compare.summary import processor
from benchmarks.compare.workloads import MAX_NUM_SEQS

# Prompt and output tokens of a request, and how many requests a run has at a concurrency.
INPUT_TOKENS, OUTPUT_TOKENS = 128, 64
REQUESTS = {1: 3, 8: 16, 32: 48}
START_LIMIT_S = 900.0
FIGURES = ("output_throughput", "median_ttft_ms", "median_itl_ms", "p99_itl_ms")


class ServerFailedError(Exception):
    """A server ended or never became healthy."""


@dataclasses.dataclass(slots=True)
class Server:
    """A server in a process group of its own, stopped unless it is its turn."""

    name: str
    process: "subprocess.Popen[bytes]"
    url: str
    startup_s: float

    @classmethod
    def start(cls, name: str, args: argparse.Namespace, cache: Path) -> "Server":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command, env = _command(name, args, port, cache)
        log = (args.out / f"{name}-server.log").open("ab")
        process = subprocess.Popen(
            command, stdout=log, stderr=log, start_new_session=True, env={**os.environ, **env}
        )
        server = cls(name, process, f"http://127.0.0.1:{port}", 0.0)
        server.startup_s = server._wait_until_healthy()
        return server

    def end(self) -> None:
        process_group.end(self.process)

    def load(self, concurrency: int, round_number: int, args: argparse.Namespace) -> dict[str, Any]:
        """One run of the client, with this server awake."""
        process_group.send(self.process, signal.SIGCONT)
        result = args.out / "client.json"
        try:
            self._wait_until_healthy()
            subprocess.run(
                [
                    *(sys.executable, "-m", "jaxllm.cli", "bench", "serve", "--disable-tqdm"),
                    *("--base-url", self.url, "--tokenizer", args.model, "--ignore-eos"),
                    *("--max-concurrency", str(concurrency), "--seed", str(round_number)),
                    *("--num-prompts", str(REQUESTS[concurrency])),
                    *("--random-input-len", str(INPUT_TOKENS)),
                    *("--random-output-len", str(OUTPUT_TOKENS)),
                    *("--save-result", "--result-dir", str(args.out)),
                    *("--result-filename", result.name),
                ],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            return json.loads(result.read_text())
        finally:
            result.unlink(missing_ok=True)
            process_group.send(self.process, signal.SIGSTOP)

    def _wait_until_healthy(self) -> float:
        """Seconds until /health is 200; ends the server if it takes more than START_LIMIT_S."""
        begin = time.perf_counter()
        while not self._healthy():
            if self.process.poll() is not None or time.perf_counter() - begin > START_LIMIT_S:
                self.end()
                raise ServerFailedError(f"{self.name} did not become healthy; see its log")
            time.sleep(0.05)
        return time.perf_counter() - begin

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
                return reply.status == 200
        except (urllib.error.URLError, OSError):
            return False


def _command(
    name: str, args: argparse.Namespace, port: int, cache: Path
) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment of a server."""
    engine, _, dtype = name.partition("-")
    common = [
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", dtype or "bfloat16"),
        *("--max-model-len", "2048", "--max-num-seqs", str(MAX_NUM_SEQS)),
    ]
    if engine == "jaxllm":
        own = [sys.executable, "-m", "jaxllm.cli", "serve", args.model]
        memory = ["--kv-cache-memory", "2GiB", "--compilation-cache-dir", str(cache)]
        # While it is stopped its engine must not count as one that hangs.
        return [*own, *common, *memory, "--hang-timeout", "86400"], {}
    python = str(args.peers / "vllm" / "bin" / "python")
    libraries = preloaded(PRELOADS, args.peers / "vllm")
    own = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", args.model]
    return [*own, *common], {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_CACHE_ROOT": str(cache),
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(libraries),
    }


def compare_rows(
    starts: dict[str, list[float]], runs: list[dict[str, Any]], reference: str
) -> list[dict[str, Any]]:
    """Start-up and the client's figures per server: medians, spread, ratio to the reference."""
    rows: list[dict[str, Any]] = []
    for kind, index in (("start-up cold, s", 0), ("start-up warm, s", 1)):
        for name, seconds in starts.items():
            rows.append({"measure": kind, "server": name, "value": seconds[index]})
    for concurrency in dict.fromkeys(run["concurrency"] for run in runs):
        for figure in FIGURES:
            for name in starts:
                values = [
                    run[figure]
                    for run in runs
                    if (run["server"], run["concurrency"]) == (name, concurrency)
                ]
                rows.append(
                    {
                        "measure": f"{figure}, concurrency {concurrency}",
                        "server": name,
                        "value": statistics.median(values),
                        "least": min(values),
                        "most": max(values),
                    }
                )
    base = {row["measure"]: row["value"] for row in rows if row["server"] == reference}
    for row in rows:
        if row["measure"] in base:
            row["ratio"] = row["value"] / base[row["measure"]]
    return rows


def _markdown(rows: list[dict[str, Any]], reference: str) -> str:
    lines = [
        f"| measure | server | median (least to most) | times {reference} |",
        "|---|---|---|---|",
    ]
    for row in rows:
        spread = f" ({row['least']:.1f} to {row['most']:.1f})" if "least" in row else ""
        ratio = f"{row['ratio']:.2f}" if "ratio" in row else ""
        lines.append(
            f"| {row['measure']} | {row['server']} | {row['value']:.1f}{spread} | {ratio} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path, required=True, help="where setup_peers.sh built")
    parser.add_argument("--model", required=True, help="Hugging Face folder, bfloat16 weights")
    parser.add_argument("--out", type=Path, required=True, help="folder for results and logs")
    parser.add_argument(
        "--servers",
        nargs="+",
        default=["jaxllm", "vllm"],
        help="jaxllm or vllm, with -float32 behind for another dtype than bfloat16",
    )
    parser.add_argument("--concurrency", type=int, nargs="+", choices=REQUESTS, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--reference", default="vllm", help="the server the ratios compare with")
    args = parser.parse_args()
    args.peers, args.model = args.peers.resolve(), str(Path(args.model).resolve())
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)

    starts: dict[str, list[float]] = {}
    runs: list[dict[str, Any]] = []
    servers: list[Server] = []
    with tempfile.TemporaryDirectory() as caches:
        try:
            for name in args.servers:
                cache = Path(caches) / name
                cold = Server.start(name, args, cache)
                cold.end()
                warm = Server.start(name, args, cache)
                servers.append(warm)
                process_group.send(warm.process, signal.SIGSTOP)
                starts[name] = [cold.startup_s, warm.startup_s]
                print(
                    f"{name}: cold {cold.startup_s:.1f} s, warm {warm.startup_s:.1f} s",
                    file=sys.stderr,
                )
            for round_number in range(args.rounds):
                for concurrency in args.concurrency:
                    for server in servers:
                        result = server.load(concurrency, round_number, args)
                        figures = {figure: result[figure] for figure in FIGURES}
                        runs.append({"server": server.name, "concurrency": concurrency, **figures})
                        print(server.name, concurrency, figures, file=sys.stderr)
        finally:
            for server in servers:
                server.end()
    rows = compare_rows(starts, runs, args.reference)
    results = {
        "machine": {"processor": processor(), "cores": sorted(os.sched_getaffinity(0))},
        "input_tokens": INPUT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "rows": rows,
        "runs": runs,
    }
    (args.out / "serving.json").write_text(json.dumps(results, indent=1) + "\n")
    (args.out / "serving.md").write_text(_markdown(rows, args.reference))
    print(_markdown(rows, args.reference), end="")


if __name__ == "__main__":
    main()
