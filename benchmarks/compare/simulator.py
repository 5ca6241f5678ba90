"""The simulator against the engine: one trace to fit step times to, another one to foretell.

    python -m benchmarks.compare.simulator --model MODELS/smollm2-bf16 --out results

Starts an engine in this process, sends it a trace in real time and fits step times to its steps;
then sends it traces of other rates and lengths, and has `jaxllm simulate` foretell them from the
fitted step times. Writes the samples, the traces and simulator.json to OUT. Ends with 1 where
throughput or mean TTFT is missed by more than ``--tolerance``. The machine must be idle: step times
are those of the calibration.
"""

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare.summary import processor
from jaxllm.cli import main as jaxllm
from jaxllm.config import EngineConfig
from jaxllm.execution.buckets import decode_buckets, token_buckets
from jaxllm.planning.replay import replay
from jaxllm.planning.step_time import fit_step_time, write_samples
from jaxllm.planning.trace import Lengths, TraceRequest, Traffic
from jaxllm.startup import start_engine

MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, BLOCK_SIZE = 512, 16, 256, 16
KV_CACHE_MEMORY = "512MiB"

CALIBRATION = Traffic(24, 1.6, Lengths.parse("16:240"), Lengths.parse("8:56"), seed=1)
CHECKS = {
    "0.6 requests/s, 100 to 300 in, 8 to 40 out": Traffic(
        12, 0.6, Lengths.parse("100:300"), Lengths.parse("8:40"), seed=2
    ),
    "12 requests at once, 32 to 160 in, 24 to 48 out": Traffic(
        12, 0.0, Lengths.parse("32:160"), Lengths.parse("24:48"), seed=3
    ),
}


def write_trace(path: Path, trace: Sequence[TraceRequest]) -> None:
    """The JSONL that `jaxllm simulate --trace` reads."""
    lines = [
        json.dumps(
            {
                "arrival": entry.arrival,
                "prompt_tokens": entry.prompt_tokens,
                "output_tokens": entry.output_tokens,
            }
        )
        for entry in trace
    ]
    path.write_text("\n".join(lines) + "\n")


def simulated(model: str, trace: Path, samples: Path) -> dict[str, Any]:
    """What the command `jaxllm simulate` foretells."""
    command = [
        *("simulate", model, "--gpu", "cpu", "--kv-cache-memory", KV_CACHE_MEMORY, "--json"),
        *("--samples", str(samples), "--trace", str(trace), "--block-size", str(BLOCK_SIZE)),
        *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS)),
        *("--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS)),
    ]
    print("jaxllm", *command, file=sys.stderr)
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        jaxllm(command)
    return json.loads(text.getvalue())[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument("--tolerance", type=float, default=0.15, help="share (default: 0.15)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    engine = start_engine(
        EngineConfig(
            model=args.model,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            block_size=BLOCK_SIZE,
            kv_cache_memory=KV_CACHE_MEMORY,  # type: ignore[arg-type]
        ),
        progress=False,
    )

    def run(traffic: Traffic, name: str) -> tuple[Path, Any]:
        trace = list(traffic.requests())
        path = args.out / f"{name}.jsonl"
        write_trace(path, trace)
        vocab_size = engine.model_config.vocab_size
        measured = replay(engine.core, trace, vocab_size=vocab_size, seed=traffic.seed)
        engine.core.reset_prefix_cache()
        return path, measured

    _, calibration = run(CALIBRATION, "calibration")
    samples = args.out / "steps.json"
    buckets = {*decode_buckets(MAX_NUM_SEQS), *token_buckets(MAX_NUM_BATCHED_TOKENS)}
    write_samples(samples, calibration.samples, sorted(buckets))
    fit = fit_step_time(calibration.samples, sorted(buckets))
    rows = []
    for number, (name, traffic) in enumerate(CHECKS.items(), 1):
        trace, measured = run(traffic, f"check{number}")
        own = args.out / f"steps{number}.json"
        write_samples(own, measured.samples, sorted(buckets))
        for figure, found in (
            ("output tokens/s", measured.output_tokens_per_second),
            ("mean TTFT, ms", measured.ttft.mean * 1e3),
        ):
            rows.append({"traffic": name, "figure": figure, "measured": found, "trace": str(trace)})
    for row in rows:
        result = simulated(args.model, Path(row["trace"]), samples)
        if row["figure"] == "output tokens/s":
            row["simulated"] = result["output_tokens_per_second"]
        else:
            row["simulated"] = result["ttft"]["mean"] * 1e3
        row["error"] = row["simulated"] / row["measured"] - 1
        print(
            f"{row['traffic']}: {row['figure']} measured {row['measured']:.1f}, simulated "
            f"{row['simulated']:.1f} ({row['error']:+.1%})"
        )
    results = {
        "machine": processor(),
        "fit": {"steps": fit.num_samples, "mean_error": fit.mean_error},
        "rows": rows,
    }
    (args.out / "simulator.json").write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(any(abs(row["error"]) > args.tolerance for row in rows))


if __name__ == "__main__":
    main()
