"""transformers' generate, all requests in one padded batch. Runs in DIR/torch of setup_peers.sh."""

import argparse
from typing import Any

import torch
import transformers

from benchmarks.compare import harness


class TransformersEngine:
    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_num_threads(len(harness.cores()))
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            args.model, dtype=getattr(torch, args.dtype)
        ).eval()
        # An EOS that is set would end a request early.
        self._model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        width = max(len(ids) for ids in prompts)
        ids = torch.zeros((len(prompts), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        out = self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )
        return out[:, width:].tolist()

    def info(self) -> dict[str, Any]:
        return {
            "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
            "threads": torch.get_num_threads(),
        }


if __name__ == "__main__":
    harness.main("transformers", TransformersEngine, __doc__ or "")
