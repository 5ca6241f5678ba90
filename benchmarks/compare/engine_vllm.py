"""vLLM on the CPU, offline. Runs in the environment DIR/vllm of setup_peers.sh.

``--bind all`` gives its workers every core this process may use; ``--bind auto`` leaves the choice
to vLLM, which keeps one core for its front end. libtcmalloc and libiomp are preloaded where they
are found, as vLLM's documentation advises.
"""

import argparse
import glob
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.compare import harness
from benchmarks.compare.workloads import MAX_NUM_SEQS

PRELOADS = ("/usr/lib/*/libtcmalloc_minimal.so.4", "lib/libiomp5.so")


def preloaded(patterns: tuple[str, ...], prefix: str | Path) -> list[str]:
    """The libraries of these patterns that exist; relative ones lie in an environment's folder."""
    return [path for pattern in patterns for path in glob.glob(str(Path(prefix) / pattern))]


class VllmEngine:
    def __init__(self, args: argparse.Namespace) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        if args.bind == "all":
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, harness.cores()))
        self._preloaded = preloaded(PRELOADS, sys.prefix)
        # The workers are processes of their own, started after this line.
        os.environ["LD_PRELOAD"] = ":".join(self._preloaded)

        from vllm import LLM

        self._llm = LLM(
            model=args.model,
            dtype=args.dtype,
            max_model_len=args.setup.max_model_len,
            max_num_seqs=MAX_NUM_SEQS,
            enable_prefix_caching=args.setup.prefix_caching,
            enforce_eager=args.enforce_eager,
            seed=0,
        )

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def info(self) -> dict[str, Any]:
        import torch
        import vllm

        return {
            "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
            "threads": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto"),
            "preloaded": [os.path.basename(path) for path in self._preloaded],
        }


if __name__ == "__main__":
    harness.main("vllm", VllmEngine, __doc__ or "")
