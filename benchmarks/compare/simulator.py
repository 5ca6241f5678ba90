"""The simulator against the engine: traces to fit step times to, other ones to foretell.

    python -m benchmarks.compare.simulator --model MODELS/smollm2-bf16 --out results

Starts an engine in this process and sends it traces in real time: one, then those of CHECKS, which
have other rates and lengths, then one like the first. Step times are fitted to the first and the
last, and `jaxllm simulate` foretells the others from them. Writes the samples, the traces and
simulator.json to OUT. Ends with 1 where throughput or mean TTFT is missed by more than
``--tolerance``. Nothing else may run: a step takes what it took in the traces fitted to.
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
from jaxllm.planning.replay import Replay, replay
from jaxllm.planning.step_time import fit_step_time, write_samples
from jaxllm.planning.trace import Lengths, TraceRequest, Traffic
from jaxllm.startup import start_engine

MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, BLOCK_SIZE = 512, 16, 256, 16
KV_CACHE_MEMORY = "512MiB"

CALIBRATIONS = [
    Traffic(14, 1.6, Lengths.parse("16:240"), Lengths.parse("8:56"), seed=seed) for seed in (1, 4)
]
CHECKS = {
    "0.5 requests/s, 100 to 300 in, 8 to 40 out": Traffic(
        10, 0.5, Lengths.parse("100:300"), Lengths.parse("8:40"), seed=2
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

    def run(traffic: Traffic, name: str) -> tuple[Path, Replay]:
        trace = list(traffic.requests())
        path = args.out / f"{name}.jsonl"
        write_trace(path, trace)
        vocab_size = engine.model_config.vocab_size
        measured = replay(engine.core, trace, vocab_size=vocab_size, seed=traffic.seed)
        engine.core.reset_prefix_cache()
        return path, measured

    _, before = run(CALIBRATIONS[0], "before")
    checks = [run(traffic, f"check{i}") for i, traffic in enumerate(CHECKS.values(), 1)]
    _, after = run(CALIBRATIONS[1], "after")
    buckets = sorted({*decode_buckets(MAX_NUM_SEQS), *token_buckets(MAX_NUM_BATCHED_TOKENS)})
    samples = args.out / "steps.json"
    write_samples(samples, [*before.samples, *after.samples], buckets)
    fit = fit_step_time([*before.samples, *after.samples], buckets)

    rows = []
    for number, (name, (trace, measured)) in enumerate(zip(CHECKS, checks, strict=True), 1):
        write_samples(args.out / f"steps-check{number}.json", measured.samples, buckets)
        result = simulated(args.model, trace, samples)
        for figure, found, foretold in (
            (
                "output tokens/s",
                measured.output_tokens_per_second,
                result["output_tokens_per_second"],
            ),
            ("mean TTFT, ms", measured.ttft.mean * 1e3, result["ttft"]["mean"] * 1e3),
        ):
            error = foretold / found - 1
            rows.append(
                {
                    "traffic": name,
                    "figure": figure,
                    "measured": found,
                    "simulated": foretold,
                    "error": error,
                }
            )
            print(f"{name}: {figure} measured {found:.1f}, simulated {foretold:.1f} ({error:+.1%})")
    results = {
        "machine": processor(),
        "fit": {"steps": fit.num_samples, "mean_error": fit.mean_error},
        "rows": rows,
    }
    (args.out / "simulator.json").write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(any(abs(row["error"]) > args.tolerance for row in rows))


if __name__ == "__main__":
    main()
