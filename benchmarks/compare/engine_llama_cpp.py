"""llama.cpp through llama-cpp-python's batch API. Runs in DIR/llama-cpp of setup_peers.sh.

The package's `Llama` class runs one sequence at a time, so requests are batched here as
`llama-batched-bench` does it: all prompts are given to `llama_decode`, then one token of every
sequence per call. Sequences have a cache of their own each, which is faster than one cache with a
mask over all. With prefix caching, what all prompts begin with is computed once, in the first
sequence, and copied to the others. The weights are MODEL.DTYPE.gguf beside the folder MODEL, made
by convert_gguf.sh.
"""

import argparse
import ctypes
import importlib.metadata
import os
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.compare import harness
from benchmarks.compare.workloads import common_prefix

# Tokens in a call (logical) and in a forward pass (physical): llama.cpp's defaults.
BATCH, PHYSICAL_BATCH = 2048, 512


class LlamaCppError(Exception):
    """llama.cpp refused a model, a context or a batch."""


class LlamaCppEngine:
    def __init__(self, args: argparse.Namespace) -> None:
        path = Path(f"{args.model}.{args.dtype}.gguf")
        if not path.exists():
            raise LlamaCppError(f"{path} is missing: make it with convert_gguf.sh")
        self._threads = len(harness.cores())
        self._prefix_caching = args.setup.prefix_caching
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            os.fsencode(path), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise LlamaCppError(f"{path} could not be loaded")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._context: Any = None
        self._shape = (0, 0)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        context = self._fitting_context(len(prompts), max(map(len, prompts)) + new_tokens)
        memory = llama_cpp.llama_get_memory(context)
        llama_cpp.llama_memory_clear(memory, True)
        shared = common_prefix(prompts) if self._prefix_caching and len(prompts) > 1 else 0
        if shared:
            self._decode([(0, i, prompts[0][i], False) for i in range(shared)])
            for sequence in range(1, len(prompts)):
                llama_cpp.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
        last = self._decode(
            [
                (sequence, i, prompt[i], i == len(prompt) - 1)
                for sequence, prompt in enumerate(prompts)
                for i in range(shared, len(prompt))
            ]
        )
        outputs = [[token] for token in last]
        for step in range(new_tokens - 1):
            last = self._decode(
                [
                    (sequence, len(prompt) + step, last[sequence], True)
                    for sequence, prompt in enumerate(prompts)
                ]
            )
            for tokens, token in zip(outputs, last, strict=True):
                tokens.append(token)
        return outputs

    def info(self) -> dict[str, Any]:
        system = llama_cpp.llama_print_system_info().decode()
        return {
            "versions": {"llama-cpp-python": importlib.metadata.version("llama-cpp-python")},
            "threads": self._threads,
            "system": system,
        }

    def _fitting_context(self, sequences: int, tokens: int) -> Any:
        """A context for that many sequences of that many tokens, made anew when they change."""
        if self._context is not None and self._shape == (sequences, tokens):
            return self._context
        if self._context is not None:
            llama_cpp.llama_free(self._context)
        params = llama_cpp.llama_context_default_params()
        per_sequence = -(-tokens // 256) * 256
        params.n_ctx = per_sequence * sequences
        params.n_seq_max = sequences
        params.n_batch, params.n_ubatch = BATCH, PHYSICAL_BATCH
        params.n_threads = params.n_threads_batch = self._threads
        params.kv_unified = False
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise LlamaCppError(f"no context for {sequences} sequences of {tokens} tokens")
        self._shape = (sequences, tokens)
        return self._context

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """Runs (sequence, position, token, wanted); the likeliest next token of each wanted one."""
        batch, tokens = self._batch, []
        for begin in range(0, len(entries), BATCH):
            part = entries[begin : begin + BATCH]
            for i, (sequence, position, token, wanted) in enumerate(part):
                batch.token[i] = token
                batch.pos[i] = position
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = sequence
                batch.logits[i] = wanted
            batch.n_tokens = len(part)
            status = llama_cpp.llama_decode(self._context, batch)
            if status:
                raise LlamaCppError(f"llama_decode answered {status}")
            for i, (_, _, _, wanted) in enumerate(part):
                if wanted:
                    row = llama_cpp.llama_get_logits_ith(self._context, i)
                    address = ctypes.cast(row, ctypes.POINTER(ctypes.c_float))
                    tokens.append(int(np.ctypeslib.as_array(address, (self._vocab,)).argmax()))
        return tokens


if __name__ == "__main__":
    harness.main("llama-cpp", LlamaCppEngine, __doc__ or "")
