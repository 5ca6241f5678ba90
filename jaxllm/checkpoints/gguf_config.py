"""A Hugging Face configuration from the metadata of a GGUF file."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.checkpoints.errors import CorruptFileError, UnsupportedFormatError
from jaxllm.checkpoints.gguf_file import GGUFFile

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""`general.architecture` values; Mistral and SmolLM2 files call themselves llama."""

ROPE_FREQS = "rope_freqs.weight"
"""The tensor in which llama.cpp keeps Llama 3's frequency divisors, [D // 2]."""

# Llama 3.1 and 3.2 as published; the factor differs by model and is read from the file.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192
_FREQS_TOLERANCE = 1e-5

_SAMPLING: Mapping[str, str] = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def architecture(file: GGUFFile) -> str:
    """The file's architecture.

    Raises:
        UnsupportedFormatError: none is given, or one outside ARCHITECTURES.
    """
    found = file.metadata.get("general.architecture")
    if found not in ARCHITECTURES:
        raise UnsupportedFormatError(
            f"{file.path} holds the architecture {found!r}; known are {', '.join(ARCHITECTURES)}"
        )
    return found


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """The config.json that the file's model would have on the Hub.

    Raises:
        UnsupportedFormatError: an unknown architecture, a rope scaling other than none, linear,
            yarn and llama3, rotary dimensions other than head_dim, or head counts by layer.
        CorruptFileError: a key or tensor is missing or of the wrong type.
    """
    arch = architecture(file)
    keys = _Keys(file, arch)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CorruptFileError(f"{file.path} has no matrix token_embd.weight")
    heads = keys.integer("attention.head_count")
    kv_heads = keys.integer("attention.head_count_kv", heads)
    if not heads or not kv_heads:
        raise CorruptFileError(f"{file.path} has {heads} query heads and {kv_heads} KV heads")
    hidden = keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    if (rotary := keys.integer("rope.dimension_count", head_dim)) != head_dim:
        raise UnsupportedFormatError(
            f"{file.path} rotates {rotary} of the {head_dim} dimensions of a head; "
            "only all of them are supported"
        )
    rope_theta = keys.number("rope.freq_base", 10000.0)
    config: dict[str, Any] = {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": rope_theta,
        "rope_scaling": _rope_scaling(file, keys, rope_theta, head_dim),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "torch_dtype": "bfloat16",
        **_special_tokens(file),
    }
    return config | _family(keys, arch)


def generation_config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """The generation_config.json: end tokens and the recommended sampling, where given."""
    result = _special_tokens(file)
    ends = [
        file.metadata[key]
        for key in (
            "tokenizer.ggml.eos_token_id",
            "tokenizer.ggml.eot_token_id",
            "tokenizer.ggml.eom_token_id",
        )
        if key in file.metadata
    ]
    if len(set(ends)) > 1:
        result["eos_token_id"] = list(dict.fromkeys(ends))
    for key, name in _SAMPLING.items():
        if key in file.metadata:
            value = file.metadata[key]
            result[name] = _decimal(value) if isinstance(value, float) else value
    return result


def _family(keys: "_Keys", arch: str) -> dict[str, Any]:
    window = keys.integer("attention.sliding_window", 0)
    if arch == "llama" and window:
        return {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": window,
        }
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[arch]
    return {"architectures": [f"{name}ForCausalLM"], "model_type": arch}


def _special_tokens(file: GGUFFile) -> dict[str, Any]:
    found = {
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return {name: value for name, value in found.items() if value is not None}


def _rope_scaling(
    file: GGUFFile, keys: "_Keys", rope_theta: float, head_dim: int
) -> dict[str, Any] | None:
    kind = keys.text("rope.scaling.type", "none")
    if ROPE_FREQS in file.tensors:
        if kind != "none":
            raise UnsupportedFormatError(
                f"{file.path} has both {ROPE_FREQS} and the rope scaling {kind!r}"
            )
        return _llama3_scaling(file, rope_theta, head_dim)
    factor = keys.number("rope.scaling.factor", 1.0)
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedFormatError(
            f"{file.path} has the rope scaling {kind!r}; known are none, linear, yarn "
            f"and llama3 (from {ROPE_FREQS})"
        )
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    original = keys.integer("rope.scaling.original_context_length", 0)
    if original:
        scaling["original_max_position_embeddings"] = original
    for key, name in (
        ("rope.scaling.yarn_beta_fast", "beta_fast"),
        ("rope.scaling.yarn_beta_slow", "beta_slow"),
    ):
        if (value := keys.number(key, 0.0)) > 0:
            scaling[name] = value
    attention = keys.number("rope.scaling.attn_factor", 1.0)
    if attention != 1.0 or keys.number("rope.scaling.yarn_log_multiplier", 0.0):
        raise UnsupportedFormatError(
            f"{file.path} has yarn with its own attention factor ({attention}) or log "
            "multiplier; only the standard ones are supported"
        )
    return scaling


def llama3_divisors(
    rope_theta: float, head_dim: int, factor: float, low: float, high: float, original: int
) -> np.ndarray:
    """What each rotary frequency is divided by in Llama 3.1's context extension.

    With r = original / wavelength the number of turns within the original context: 1 for r >= high,
    `factor` for r <= low, and between them the reciprocal of the interpolated 1/factor .. 1.

    Returns:
        float64 [D // 2].
    """
    frequencies = rope_theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = original * frequencies / (2 * np.pi)
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - share) / factor + share)


def _llama3_scaling(file: GGUFFile, rope_theta: float, head_dim: int) -> dict[str, Any] | None:
    shape = file.tensors[ROPE_FREQS].shape
    if shape != (head_dim // 2,):
        raise CorruptFileError(f"{file.path}: {ROPE_FREQS} has shape {shape}, not ({head_dim}/2,)")
    stored = file.read(ROPE_FREQS, slice(None), (0, head_dim // 2), np.dtype(np.float64))[0]
    if np.all(stored == 1.0):
        return None
    factor = _decimal(stored.max())
    expected = llama3_divisors(
        rope_theta, head_dim, factor, _LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL
    )
    error = float(np.max(np.abs(stored / expected - 1.0)))
    if not error <= _FREQS_TOLERANCE:
        raise UnsupportedFormatError(
            f"{file.path}: {ROPE_FREQS} is not Llama 3's scaling (factor {factor}, low "
            f"{_LLAMA3_LOW}, high {_LLAMA3_HIGH}, original context {_LLAMA3_ORIGINAL}): "
            f"off by a factor of {1 + error:.6g}"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL,
    }


def _decimal(value: float) -> float:
    """The shortest decimal that gives the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


class _Keys:
    """Typed look-ups of `{arch}.{key}`; one without a default must be there."""

    def __init__(self, file: GGUFFile, arch: str) -> None:
        self._file, self._arch = file, arch

    def _get(self, key: str, default: Any) -> Any:
        value = self._file.metadata.get(f"{self._arch}.{key}", default)
        if value is None:
            raise CorruptFileError(f"{self._file.path} lacks the key {self._arch}.{key}")
        return value

    def _refuse(self, key: str, value: Any, kind: str) -> UnsupportedFormatError:
        return UnsupportedFormatError(
            f"{self._file.path}: {self._arch}.{key} is {str(value)[:60]}, not {kind}"
        )

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if type(value) is not int or value < 0:
            raise self._refuse(key, value, "one non-negative integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float) or not np.isfinite(value):
            raise self._refuse(key, value, "a finite number")
        return _decimal(value)

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._refuse(key, value, "a string")
        return value
