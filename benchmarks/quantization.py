"""What int8 weights cost in accuracy and gain in speed, beside the unrounded model.

    python -m benchmarks.quantization [--model smollm2] [--rounds 3]

Accuracy, against tests/golden/data/smollm2_greedy.json (float32 greedy answers of another
implementation to 20 prompts): the mean log probability of those answers' tokens, given the prompt,
and the share of greedy tokens before the first that differs. Speed: one request, and 32 at once,
engines in turns; median of the rounds with the least and the most.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from benchmarks.compare.summary import common_share
from benchmarks.compare.workloads import WORKLOADS
from jaxllm import LLM, SamplingParams

GOLDEN = Path(__file__).parent.parent / "tests/golden/data/smollm2_greedy.json"
ENGINES: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, int8 weights": {"dtype": "bfloat16", "quantization": "int8"},
}
# (name, requests, new tokens) of the speed runs; prompts are those of the workload "throughput".
LOADS = (("one request", 1, 48), ("32 requests", 32, 8))


def accuracy(llm: LLM) -> tuple[float, float]:
    """Mean log probability of the recorded tokens, and the share of greedy agreement."""
    cases = json.loads(GOLDEN.read_text())["prompts"]
    prompts = [case["prompt_token_ids"] for case in cases]
    answers = [case["output_token_ids"] for case in cases]
    whole = [{"prompt_token_ids": [*ids, *new]} for ids, new in zip(prompts, answers, strict=True)]
    scored = llm.generate(whole, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    logprobs = [
        entry[token].logprob
        for output, answer in zip(scored, answers, strict=True)
        for entry, token in zip((output.prompt_logprobs or [])[-len(answer) :], answer, strict=True)
        if entry
    ]
    greedy = [
        SamplingParams(temperature=0.0, max_tokens=len(answer), ignore_eos=True)
        for answer in answers
    ]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy, use_tqdm=False)
    ours = [list(output.outputs[0].token_ids) for output in outputs]
    return statistics.mean(logprobs), common_share(ours, answers)


def speed(llm: LLM, requests: int, new_tokens: int, round_number: int) -> float:
    """Output tokens per second."""
    prompts = WORKLOADS["throughput"].prompts(round_number)[:requests]
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    begin = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return requests * new_tokens / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    engines = {
        name: LLM(
            args.model,
            max_model_len=1024,
            max_num_seqs=32,
            enable_prefix_caching=False,
            kv_cache_memory=2**29,
            progress=False,
            **settings,
        )
        for name, settings in ENGINES.items()
    }
    print("| weights | MB | mean logprob of the answers | greedy agreement |")
    print("|---|---|---|---|")
    for name, llm in engines.items():
        megabytes = sum(array.nbytes for array in llm.params.values()) / 1e6
        logprob, agreement = accuracy(llm)
        print(f"| {name} | {megabytes:.0f} | {logprob:.4f} | {agreement:.3f} |", flush=True)
    for label, requests, new_tokens in LOADS:
        speeds: dict[str, list[float]] = {name: [] for name in engines}
        for round_number in range(args.rounds + 1):
            for name, llm in engines.items():
                value = speed(llm, requests, new_tokens, round_number)
                if round_number:
                    speeds[name].append(value)
        base = statistics.median(speeds["bfloat16"])
        for name, values in speeds.items():
            median = statistics.median(values)
            print(
                f"{label}, {name}: {median:.1f} tok/s ({min(values):.1f} to {max(values):.1f}), "
                f"{median / base:.2f} times bfloat16",
                flush=True,
            )


if __name__ == "__main__":
    main()
