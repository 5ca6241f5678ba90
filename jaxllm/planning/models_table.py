"""Well-known models as config.json would give them: architecture numbers only, no weights.

Each entry repeats the public config.json of the named Hugging Face repository, reduced to the
fields that decide shapes.
"""

from typing import Any

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "dtype": "bfloat16",
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _llama(layers: int, hidden: int, mlp: int, heads: int, **other: Any) -> dict[str, Any]:
    factor = 32.0 if other.get("tie_word_embeddings") else 8.0
    return _LLAMA | {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "rope_scaling": _LLAMA3_ROPE | {"factor": factor},
        **other,
    }


def _smollm2(layers: int, hidden: int, mlp: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 8192,
        "rope_theta": 130000.0 if layers == 24 else 100000.0,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


def _qwen2(
    layers: int, hidden: int, mlp: int, heads: int, kv_heads: int, vocab: int, tied: bool
) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": vocab,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
    }


def _qwen3(
    layers: int, hidden: int, mlp: int, heads: int, kv_heads: int, tied: bool
) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
    }


MODELS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _llama(32, 4096, 14336, 32),
    "llama-3.1-70b": _llama(80, 8192, 28672, 64),
    "llama-3.2-1b": _llama(16, 2048, 8192, 32, head_dim=64, tie_word_embeddings=True),
    "llama-3.2-3b": _llama(28, 3072, 8192, 24, tie_word_embeddings=True),
    "mistral-7b": {
        "architectures": ["MistralForCausalLM"],
        "vocab_size": 32768,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "dtype": "bfloat16",
    },
    "qwen2.5-0.5b": _qwen2(24, 896, 4864, 14, 2, 151936, True),
    "qwen2.5-1.5b": _qwen2(28, 1536, 8960, 12, 2, 151936, True),
    "qwen2.5-3b": _qwen2(36, 2048, 11008, 16, 2, 151936, True),
    "qwen2.5-7b": _qwen2(28, 3584, 18944, 28, 4, 152064, False),
    "qwen2.5-14b": _qwen2(48, 5120, 13824, 40, 8, 152064, False),
    "qwen2.5-32b": _qwen2(64, 5120, 27648, 40, 8, 152064, False),
    "qwen2.5-72b": _qwen2(80, 8192, 29568, 64, 8, 152064, False),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, 8, True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, 8, True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, 8, True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32, 8, False),
    "qwen3-14b": _qwen3(40, 5120, 17408, 40, 8, False),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64, 8, False),
    "smollm2-135m": _smollm2(30, 576, 1536, 9, 3),
    "smollm2-360m": _smollm2(32, 960, 2560, 15, 5),
    "smollm2-1.7b": _smollm2(24, 2048, 8192, 32, 32),
}
"""config.json by lower-case name, without the organisation and without "-instruct"."""


def find_model(name: str) -> dict[str, Any] | None:
    """The table's entry for a name such as "Llama-3.1-8B" or "Qwen2.5-7B-Instruct", or None."""
    plain = name.lower()
    for suffix in ("-instruct", "-chat", "-base"):
        plain = plain.removesuffix(suffix)
    return MODELS.get(plain)
