"""Record tiny random models of every supported family, and what transformers makes of them.

Needs torch, transformers and safetensors (an environment of its own, not the project's;
``benchmarks/compare/setup_peers.sh`` makes one). Recorded with torch 2.13.0, transformers 5.24.0:

    python tests/golden/record.py                 # everything, into tests/golden/data
    python tests/golden/record.py llama2 qwen3    # some of it

For each entry of ``FAMILIES`` the folder ``data/<name>/`` holds

- ``config.json`` and ``model.safetensors`` (float32) as ``save_pretrained`` writes them;
- ``config_v4.json``: the same settings spelt as transformers 4 did (``rope_theta``,
  ``rope_scaling``, ``torch_dtype``), checked here to give equal logits;
- ``recording.npz``: for i in 0, 1 the arrays ``ids_i`` [T] int32 with ``logits_i`` [T, V] float32
  (one forward pass over the sequence, no cache, eager attention), and ``prompt_i`` int32,
  ``greedy_i`` [32] int32 with ``gap_i`` [32] float32, the distance between the best two logits.
  Greedy continuations do not stop at EOS.

``data/llama3_sharded/`` holds the weights of ``llama3`` in three shards with their index.
``data/families.json`` says what each entry is for, and which versions made it.

Each entry names the ablations its recording must react to (no window, no scaling, zero biases,
...): a recording that a model without the feature would also pass is refused. So is one that
float32 rounding disturbs (compared with a float64 run), or whose greedy choice is a near-tie.
"""

import argparse
import copy
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM as Auto
from transformers import (
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

DATA = Path(__file__).parent / "data"
SEQUENCE_LENGTHS = (56, 43)
PROMPT_LENGTHS = (7, 21)
NEW_TOKENS = 32
SMALLEST_GAP = 2e-3
FEWEST_DISTINCT = 8
LARGEST_ROUNDING = 2e-5
# Heads of 16, which every implementation of attention takes.
SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
Ablation = Callable[[PreTrainedConfig, PreTrainedModel], None]


@dataclasses.dataclass(frozen=True)
class Family:
    """One recorded configuration."""

    about: str
    config: PreTrainedConfig
    ablations: tuple[str, ...]


def rope(theta: float, kind: str = "default", **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **more}


LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
YARN_CONTEXT = {"max_position_embeddings": 64}
WIDE_HEAD = {"hidden_size": 32, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}


def llama(**more: Any) -> LlamaConfig:
    return LlamaConfig(**{**SMALL, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, **more})


def qwen2(**more: Any) -> Qwen2Config:
    return Qwen2Config(**{**SMALL, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, **more})


FAMILIES: dict[str, Family] = {
    "llama2": Family(
        "Llama 2: multi-head attention, untied embeddings",
        llama(num_key_value_heads=4, rope_parameters=rope(10000.0), rms_norm_eps=1e-6),
        ("rope",),
    ),
    "llama3": Family(
        "Llama 3: grouped queries, rope theta 500000, three layers",
        llama(num_hidden_layers=3, rope_parameters=rope(500000.0)),
        ("rope",),
    ),
    "llama31": Family(
        "Llama 3.1 and 3.2: llama3 RoPE scaling, tied embeddings",
        llama(
            **WIDE_HEAD,
            tie_word_embeddings=True,
            rope_parameters=rope(500000.0, "llama3", **LLAMA3_ROPE),
        ),
        ("rope_scaling",),
    ),
    "llama_head_dim": Family(
        "Llama with a head_dim that is not hidden_size / heads, one KV head",
        llama(hidden_size=32, head_dim=16, num_key_value_heads=1, rope_parameters=rope(10000.0)),
        ("rope",),
    ),
    "llama_bias": Family(
        "Llama with attention_bias and mlp_bias",
        llama(attention_bias=True, mlp_bias=True, rope_parameters=rope(10000.0)),
        ("bias",),
    ),
    "smollm2": Family(
        "SmolLM2: 3 query heads per KV head, odd number of KV heads, tied embeddings",
        llama(
            hidden_size=36,
            intermediate_size=48,
            num_attention_heads=9,
            num_key_value_heads=3,
            head_dim=16,
            num_hidden_layers=3,
            tie_word_embeddings=True,
            rope_parameters=rope(100000.0),
        ),
        ("rope",),
    ),
    "mistral": Family(
        "Mistral: sliding window of 16, shorter than the sequences",
        MistralConfig(**SMALL, sliding_window=16, rms_norm_eps=1e-5, rope_parameters=rope(10000.0)),
        ("window",),
    ),
    "mistral_full": Family(
        "Mistral 0.2 and later: no sliding window, head_dim explicit",
        MistralConfig(
            **SMALL,
            sliding_window=None,
            head_dim=12,
            rms_norm_eps=1e-5,
            rope_parameters=rope(1000000.0),
        ),
        ("rope",),
    ),
    "qwen2": Family(
        "Qwen2: biases on query, key and value; tied embeddings",
        qwen2(rope_parameters=rope(1000000.0)),
        ("bias",),
    ),
    "qwen25": Family(
        "Qwen2.5 of larger sizes: untied embeddings, biases",
        qwen2(tie_word_embeddings=False, rope_parameters=rope(1000000.0)),
        ("bias",),
    ),
    "qwen2_sliding": Family(
        "Qwen2 with a sliding window of 16 in the last of three layers only",
        qwen2(
            num_hidden_layers=3,
            use_sliding_window=True,
            sliding_window=16,
            max_window_layers=2,
            rope_parameters=rope(1000000.0),
        ),
        ("window",),
    ),
    "qwen3": Family(
        "Qwen3: RMS norm on each query and key head; head_dim 16 with hidden 32 and 4 heads",
        Qwen3Config(
            **SMALL,
            head_dim=16,
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
            rope_parameters=rope(1000000.0),
        ),
        ("qk_norm",),
    ),
    "rope_linear": Family(
        "Llama with linear RoPE scaling",
        llama(
            **WIDE_HEAD, tie_word_embeddings=True, rope_parameters=rope(1e4, "linear", factor=4.0)
        ),
        ("rope_scaling",),
    ),
    "rope_llama3": Family(
        "Llama with llama3 RoPE scaling, several frequencies in the smooth band",
        llama(
            **WIDE_HEAD,
            tie_word_embeddings=True,
            rope_parameters=rope(1e4, "llama3", **LLAMA3_ROPE),
        ),
        ("rope_scaling",),
    ),
    "rope_yarn": Family(
        "Llama with yarn RoPE scaling, attention factor inferred from the factor",
        llama(
            **WIDE_HEAD,
            **YARN_CONTEXT,
            tie_word_embeddings=True,
            rope_parameters=rope(1e4, "yarn", **YARN, beta_fast=4.0, beta_slow=0.5),
        ),
        ("rope_scaling", "attention_factor"),
    ),
    "rope_yarn_attention_factor": Family(
        "Llama with yarn RoPE scaling and an explicit attention_factor",
        llama(
            **WIDE_HEAD,
            **YARN_CONTEXT,
            tie_word_embeddings=True,
            rope_parameters=rope(1e4, "yarn", **YARN, attention_factor=1.4),
        ),
        ("rope_scaling", "attention_factor"),
    ),
    "rope_yarn_mscale": Family(
        "Llama with yarn RoPE scaling, mscale and mscale_all_dim",
        llama(
            **WIDE_HEAD,
            **YARN_CONTEXT,
            tie_word_embeddings=True,
            rope_parameters=rope(1e4, "yarn", **YARN, mscale=2.0, mscale_all_dim=0.5),
        ),
        ("rope_scaling", "attention_factor"),
    ),
    "rope_yarn_untruncated": Family(
        "Llama with yarn RoPE scaling and truncate=false (correction range not rounded)",
        llama(
            **WIDE_HEAD,
            **YARN_CONTEXT,
            tie_word_embeddings=True,
            rope_parameters=rope(1e4, "yarn", **YARN, beta_fast=4.0, beta_slow=0.5, truncate=False),
        ),
        ("rope_scaling", "truncate"),
    ),
    "qwen2_yarn": Family(
        "Qwen2.5 with yarn RoPE scaling, as its model cards switch it on for long contexts",
        qwen2(**WIDE_HEAD, **YARN_CONTEXT, rope_parameters=rope(1e6, "yarn", **YARN)),
        ("rope_scaling", "bias"),
    ),
}


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Random weights under which attention, norms and biases all show in the logits."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("norm.weight"):
            value = 1.0 + 0.3 * noise
        elif name.endswith(".bias"):
            value = 0.5 * noise
        elif "embed_tokens" in name:
            value = 0.35 * noise
        elif "lm_head" in name:
            value = 1.5 * noise / weight.shape[1] ** 0.5
        elif "q_proj" in name or "k_proj" in name:
            value = 1.4 * noise / weight.shape[1] ** 0.5
        else:
            value = 1.2 * noise / weight.shape[1] ** 0.5
        weight.data.copy_(value)


def ablate(kind: str, config: PreTrainedConfig) -> tuple[PreTrainedConfig, Callable[[str], bool]]:
    """A config without the feature, and which parameters are to be neutralised."""
    config = copy.deepcopy(config)
    keep: Callable[[str], bool] = lambda name: False  # noqa: E731
    if kind == "rope":
        config.rope_parameters = rope(3.0)
    elif kind == "rope_scaling":
        config.rope_parameters = rope(config.rope_parameters["rope_theta"])
    elif kind == "attention_factor":
        config.rope_parameters = {**config.rope_parameters, "attention_factor": 1.0}
    elif kind == "truncate":
        config.rope_parameters = {**config.rope_parameters, "truncate": True}
    elif kind == "window":
        config.sliding_window = None
        if hasattr(config, "layer_types"):
            config.layer_types = ["full_attention"] * config.num_hidden_layers
    elif kind == "bias":
        keep = lambda name: name.endswith(".bias")  # noqa: E731
    elif kind == "qk_norm":
        keep = lambda name: "q_norm" in name or "k_norm" in name  # noqa: E731
    else:
        raise ValueError(f"unknown ablation {kind!r}")
    return config, keep


def build(
    config: PreTrainedConfig, state: dict[str, torch.Tensor] | None = None
) -> PreTrainedModel:
    model = Auto.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    if state is not None:
        model.load_state_dict(state)
    return model


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids: np.ndarray) -> np.ndarray:
    """[T, V] logits of one sequence, one pass, no cache."""
    return model(torch.tensor(ids)[None].long(), use_cache=False).logits[0].numpy()


def greedy(model: PreTrainedModel, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """The continuation and its gaps, or None where a step is a near-tie."""
    ids, gaps = list(prompt), []
    for _ in range(NEW_TOKENS):
        logits = logits_of(model, np.array(ids))[-1]
        second, best = np.sort(logits)[-2:]
        if best - second < SMALLEST_GAP:
            return None
        gaps.append(best - second)
        ids.append(int(logits.argmax()))
    return np.array(ids[len(prompt) :], np.int32), np.array(gaps, np.float32)


def try_seed(family: Family, seed: int) -> tuple[PreTrainedModel, dict[str, np.ndarray]] | None:
    """The model and its recording; None where a greedy step is a near-tie or the text dull."""
    rng = np.random.default_rng(seed)
    model = build(family.config)
    randomise(model, seed)
    arrays: dict[str, np.ndarray] = {}
    for i, (length, prompt_length) in enumerate(zip(SEQUENCE_LENGTHS, PROMPT_LENGTHS, strict=True)):
        ids = rng.integers(3, family.config.vocab_size, length).astype(np.int32)
        prompt = rng.integers(3, family.config.vocab_size, prompt_length).astype(np.int32)
        found = greedy(model, prompt)
        if found is None or len(set(found[0].tolist())) < FEWEST_DISTINCT:
            return None
        tokens, gaps = found
        arrays |= {
            f"ids_{i}": ids,
            f"logits_{i}": logits_of(model, ids),
            f"prompt_{i}": prompt,
            f"greedy_{i}": tokens,
            f"gap_{i}": gaps,
        }
    return model, arrays


def check(
    family: Family, model: PreTrainedModel, arrays: dict[str, np.ndarray]
) -> dict[str, Any] | None:
    """What was measured; None where rounding disturbs the logits. Refuses what says nothing."""
    ids, logits = arrays["ids_0"], arrays["logits_0"]
    state = model.state_dict()
    double = build(family.config, state).double()
    rounding = float(np.abs(logits_of(double, ids) - logits).max())
    if rounding > LARGEST_ROUNDING:
        return None
    report: dict[str, Any] = {"logit_std": float(logits.std()), "float32_rounding": rounding}
    for kind in family.ablations:
        config, neutral = ablate(kind, family.config)
        changed = {
            k: (torch.ones_like(v) if "norm" in k else torch.zeros_like(v)) if neutral(k) else v
            for k, v in state.items()
        }
        moved = float(np.abs(logits_of(build(config, changed), ids) - logits).max())
        if moved < 0.05:
            raise SystemExit(f"without {kind} the logits move by {moved:.3f} only")
        report[f"moved_without_{kind}"] = moved
    return report


def spell_as_v4(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of a config.json in the names that transformers 4 wrote."""
    config = dict(config)
    parameters = dict(config.pop("rope_parameters"))
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = None if parameters["rope_type"] == "default" else parameters
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.46.0"
    return config


def write_v4_config(folder: Path) -> None:
    settings = spell_as_v4(json.loads((folder / "config.json").read_text()))
    text = json.dumps(settings, indent=2, sort_keys=True)
    (folder / "config_v4.json").write_text(text + "\n")


def record(name: str, family: Family) -> dict[str, Any]:
    folder = DATA / name
    shutil.rmtree(folder, ignore_errors=True)
    report, seed = None, 0
    while report is None:
        seed += 1
        found = try_seed(family, seed)
        if found is not None:
            model, arrays = found
            report = check(family, model, arrays)
    model.generation_config = transformers.GenerationConfig.from_model_config(family.config)
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    (folder / "generation_config.json").unlink()
    np.savez_compressed(folder / "recording.npz", **arrays)

    write_v4_config(folder)
    for name in ("config.json", "config_v4.json"):
        config = type(family.config)(**json.loads((folder / name).read_text()))
        again = build(config, model.state_dict())
        if not np.array_equal(logits_of(again, arrays["ids_0"]), arrays["logits_0"]):
            raise SystemExit(f"{folder / name} does not give the recorded logits")
    gap = min(float(arrays["gap_0"].min()), float(arrays["gap_1"].min()))
    return {"about": family.about, "seed": seed, "smallest_greedy_gap": gap, **report}


def record_shards() -> None:
    folder = DATA / "llama3_sharded"
    shutil.rmtree(folder, ignore_errors=True)
    model = Auto.from_pretrained(DATA / "llama3", dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="180KB")
    (folder / "generation_config.json").unlink(missing_ok=True)
    shards = sorted(folder.glob("*.safetensors"))
    if len(shards) not in (2, 3):
        raise SystemExit(f"{len(shards)} shards")
    for shard in shards:
        shard.chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*FAMILIES, []], metavar="NAME")
    names = parser.parse_args().names or list(FAMILIES)
    DATA.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    summary_path = DATA / "families.json"
    summary = json.loads(summary_path.read_text()) if summary_path.exists() else {"families": {}}
    summary["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    for name in names:
        summary["families"][name] = record(name, FAMILIES[name])
        print(name, summary["families"][name])
        if name == "llama3":
            record_shards()
        done = summary["families"]
        summary["families"] = {k: done[k] for k in FAMILIES if k in done}
        summary_path.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
