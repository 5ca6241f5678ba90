"""The arithmetic of a KV cache: bytes of a token, tokens of a memory. No device, no JAX."""

import math

from jaxllm.errors import ParameterError

GIB = 2**30


def kv_bytes_per_token(
    layers: int, kv_heads: int, head_dim: int, dtype_bytes: float, tp: int = 1
) -> int:
    """Bytes of K and V that one token takes on one of `tp` devices, all layers together.

    2 * layers * (KV heads on a device) * head_dim * dtype_bytes. KV heads that do not divide by tp
    are repeated until they do: lcm(kv_heads, tp) / tp lie on each device, so with fewer heads than
    devices every device holds one.

    Args:
      layers: L.
      kv_heads: K, of the whole model.
      head_dim: D.
      dtype_bytes: bytes of a number in the cache (2 for bfloat16).
      tp: devices the model is sharded over.

    Raises:
      ParameterError: an argument is not positive.
    """
    for name, value in (
        ("layers", layers),
        ("kv_heads", kv_heads),
        ("head_dim", head_dim),
        ("dtype_bytes", dtype_bytes),
        ("tp", tp),
    ):
        _check_positive(name, value)
    heads_per_device = math.lcm(kv_heads, tp) // tp
    return math.ceil(2 * layers * heads_per_device * head_dim * dtype_bytes)


def kv_token_budget(
    gpu_gib: float, util: float, weights_gib: float, reserve_gib: float, per_token: int
) -> int:
    """Tokens of KV that fit one device: (gpu_gib * util - weights_gib - reserve_gib) / per_token.

    Sizes are per device, in GiB (2^30 bytes), and per_token in bytes; 0 where nothing is left.

    Raises:
      ParameterError: per_token or gpu_gib is not positive, util is outside (0, 1], or a size is
        negative.
    """
    _check_positive("gpu_gib", gpu_gib)
    _check_positive("per_token", per_token)
    if not 0 < util <= 1:
        raise ParameterError("util", util, "above 0, at most 1")
    for name, value in (("weights_gib", weights_gib), ("reserve_gib", reserve_gib)):
        if value < 0:
            raise ParameterError(name, value, "at least 0")
    # Rounded to whole bytes: 80 * 0.9 must count as 72 GiB however the product rounds.
    left = round((gpu_gib * util - weights_gib - reserve_gib) * GIB)
    return max(left // per_token, 0)


def full_length_requests(tokens: int, max_model_len: int) -> int:
    """Requests of max_model_len tokens that `tokens` of KV hold at once.

    Raises:
      ParameterError: max_model_len is not positive.
    """
    _check_positive("max_model_len", max_model_len)
    return tokens // max_model_len


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ParameterError(name, value, "must be positive")
