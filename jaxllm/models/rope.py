"""Rotary position embedding (RoFormer, arXiv 2104.09864) and its context-length scalings.

Frequencies are computed once, in numpy; the rotation pairs dimension i with i + D / 2, the
half-split form of the checkpoints on Hugging Face.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import ConfigError

# Scalings that are known, and what each must bring.
REQUIRED_PARAMETERS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}
ROPE_TYPES = tuple(REQUIRED_PARAMETERS)


@dataclasses.dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of one model.

    Attributes:
      theta: base of the geometric series of wavelengths.
      rope_type: one of ROPE_TYPES.
      scaling: the parameters of a scaling, under the names config.json uses.
    """

    theta: float
    rope_type: str = "default"
    scaling: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "RopeConfig":
        """Reads `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling`.

        Raises:
          ConfigError: a rope type that is not one of ROPE_TYPES, or one without its parameters.
        """
        scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        rope_type = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
        scaling.pop("type", None)
        theta = scaling.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
        if rope_type not in ROPE_TYPES:
            raise ConfigError(f"rope type {rope_type!r} is not known; known: {ROPE_TYPES}")
        if rope_type in ("yarn", "llama3"):
            scaling.setdefault(
                "original_max_position_embeddings", config.get("max_position_embeddings")
            )
        for name in REQUIRED_PARAMETERS[rope_type]:
            if scaling.get(name) is None:
                raise ConfigError(f"rope type {rope_type!r} needs {name!r}")
        return cls(float(theta), rope_type, tuple(sorted(scaling.items())))

    def frequencies(self, head_dim: int) -> tuple[np.ndarray, float]:
        """Angles per position, float32 [D / 2], and the factor that scales cos and sin."""
        exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
        base = self.theta**-exponents
        scaling = dict(self.scaling)
        factor = 1.0
        if self.rope_type == "linear":
            base = base / scaling["factor"]
        elif self.rope_type == "llama3":
            base = _llama3(base, scaling)
        elif self.rope_type == "yarn":
            base, factor = _yarn(base, head_dim, self.theta, scaling)
        return base.astype(np.float32), factor


def _llama3(base: np.ndarray, scaling: dict[str, Any]) -> np.ndarray:
    """Llama 3.1's rule: slow long wavelengths by `factor`, keep short ones, a ramp between."""
    wavelength = 2 * math.pi / base
    original = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
    return (1 - smooth) * base / scaling["factor"] + smooth * base


def _yarn(
    base: np.ndarray, head_dim: int, theta: float, scaling: dict[str, Any]
) -> tuple[np.ndarray, float]:
    """YaRN (arXiv 2309.00071), sections 3.2 to 3.4: interpolate by part, temper the softmax."""
    original = scaling["original_max_position_embeddings"]
    factor = scaling["factor"]

    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_of(scaling.get("beta_fast") or 32)
    high = dimension_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    frequencies = base / factor * ramp + base * (1 - ramp)

    def temper(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        if scaling.get("mscale") and scaling.get("mscale_all_dim"):
            attention_factor = temper(scaling["mscale"]) / temper(scaling["mscale_all_dim"])
        else:
            attention_factor = temper(1.0)
    return frequencies, float(attention_factor)


def rope_tables(
    positions: jax.Array, frequencies: np.ndarray, factor: float
) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [..., 1, D / 2], for positions int32 [...]."""
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def apply_rope(
    x: jax.Array, cos: jax.Array, sin: jax.Array, apart: Callable[[Any], Any] = lambda x: x
) -> jax.Array:
    """Rotates x [..., heads, D] by the tables of its positions; computed in float32.

    apart: applied to the products before they are added, as `Ops.apart`.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    a, b, c, d = apart((first * cos, second * sin, second * cos, first * sin))
    return jnp.concatenate([a - b, c + d], axis=-1).astype(x.dtype)
