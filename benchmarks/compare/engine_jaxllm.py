"""jaxllm through its offline API. Runs in the project's own environment."""

import argparse
import importlib.metadata
import os
from typing import Any

from benchmarks.compare import harness
from benchmarks.compare.workloads import MAX_NUM_SEQS
from jaxllm import LLM, SamplingParams


class JaxllmEngine:
    def __init__(self, args: argparse.Namespace) -> None:
        self._llm = LLM(
            model=args.model,
            dtype=args.dtype,
            max_model_len=args.setup.max_model_len,
            max_num_seqs=MAX_NUM_SEQS,
            enable_prefix_caching=args.setup.prefix_caching,
            enforce_eager=args.enforce_eager,
            kv_cache_memory=2 * 2**30,
            progress=False,
        )

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def info(self) -> dict[str, Any]:
        return {
            "versions": {
                name: importlib.metadata.version(name) for name in ("jaxllm", "jax", "jaxlib")
            },
            "threads": len(os.sched_getaffinity(0)),
        }


if __name__ == "__main__":
    harness.main("jaxllm", JaxllmEngine, __doc__ or "")
