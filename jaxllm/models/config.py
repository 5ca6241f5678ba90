"""ModelConfig: what a decoder of the Llama family needs to know, read from config.json."""

import dataclasses
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.models.rope import RopeConfig


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and options of one decoder.

    Attributes:
      attention_bias: q, k and v projections have a bias.
      output_bias: the attention's output projection has one.
      mlp_bias: the MLP's projections have one.
      qk_norm: RMSNorm over head_dim on q and k, before the rotation (Qwen3).
      windows: sliding window of each layer, in tokens; None is full attention.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} attention heads do not divide into {self.num_kv_heads} KV heads"
            )

    @property
    def num_params(self) -> int:
        """Parameters in all, biases and norms included."""
        hidden, kv = self.hidden_size, self.num_kv_heads * self.head_dim
        q = self.num_heads * self.head_dim
        layer = hidden * (q + 2 * kv) + q * hidden + 3 * hidden * self.intermediate_size
        layer += 2 * hidden + (2 * self.head_dim if self.qk_norm else 0)
        layer += (q + 2 * kv) * self.attention_bias + hidden * self.output_bias
        layer += (2 * self.intermediate_size + hidden) * self.mlp_bias
        embeddings = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        return embeddings + hidden + self.num_layers * layer


def base_config(hf: dict[str, Any], **options: Any) -> ModelConfig:
    """The fields all families share; `options` are those in which they differ.

    Raises:
      ConfigError: a field is missing or has a value the decoder cannot honour.
    """
    try:
        hidden, heads = hf["hidden_size"], hf["num_attention_heads"]
        layers = hf["num_hidden_layers"]
        if hf.get("hidden_act", "silu") not in ("silu", "swish"):
            raise ConfigError(f"hidden_act={hf['hidden_act']!r}: only 'silu' is supported")
        if hf.get("partial_rotary_factor", 1.0) != 1.0:
            raise ConfigError("partial_rotary_factor: only whole heads are rotated")
        options.setdefault("windows", (None,) * layers)
        return ModelConfig(
            vocab_size=hf["vocab_size"],
            hidden_size=hidden,
            intermediate_size=hf["intermediate_size"],
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=hf.get("num_key_value_heads") or heads,
            head_dim=hf.get("head_dim") or hidden // heads,
            max_position_embeddings=hf.get("max_position_embeddings", 2048),
            rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
            rope=RopeConfig.from_hf(hf),
            tie_word_embeddings=hf.get("tie_word_embeddings", False),
            **options,
        )
    except KeyError as error:
        raise ConfigError(f"config.json has no {error.args[0]!r}") from None


def llama_config(hf: dict[str, Any]) -> ModelConfig:
    """Llama 2 to 3.2 and SmolLM2."""
    bias = hf.get("attention_bias", False)
    return base_config(
        hf, attention_bias=bias, output_bias=bias, mlp_bias=hf.get("mlp_bias", False)
    )


def mistral_config(hf: dict[str, Any]) -> ModelConfig:
    """Mistral: a sliding window in every layer where one is set."""
    return base_config(hf, windows=_windows(hf, hf.get("sliding_window")))


def qwen2_config(hf: dict[str, Any]) -> ModelConfig:
    """Qwen2 and 2.5: bias on q, k and v."""
    return base_config(hf, attention_bias=True, windows=_qwen_windows(hf))


def qwen3_config(hf: dict[str, Any]) -> ModelConfig:
    """Qwen3: RMSNorm on q and k."""
    bias = hf.get("attention_bias", False)
    return base_config(
        hf, attention_bias=bias, output_bias=bias, qk_norm=True, windows=_qwen_windows(hf)
    )


def _qwen_windows(hf: dict[str, Any]) -> tuple[int | None, ...]:
    """Qwen's window is off unless use_sliding_window, and spares the first max_window_layers."""
    if not hf.get("use_sliding_window"):
        return (None,) * hf["num_hidden_layers"]
    return _windows(hf, hf.get("sliding_window"), hf.get("max_window_layers", 0))


def _windows(hf: dict[str, Any], window: int | None, full_layers: int = 0) -> tuple:
    types = hf.get("layer_types") or [
        "full_attention" if i < full_layers or not window else "sliding_attention"
        for i in range(hf["num_hidden_layers"])
    ]
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ConfigError(f"layer_types {sorted(unknown)}: full_attention or sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
