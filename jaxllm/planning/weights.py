"""Bytes of a model's parameters on one device, from its shapes alone."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from jaxllm.errors import ConfigError

if TYPE_CHECKING:
    from jaxllm.models.config import ModelConfig

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_DTYPE_BYTES: Mapping[str, int] = {
    **DTYPE_BYTES,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Quantization:
    """Storage of a quantised projection.

    Attributes:
      bits: of a weight.
      group: weights along the input that share a scale; None is one scale per output channel.
      scale_bytes: of a scale.
    """

    bits: int
    group: int | None
    scale_bytes: int


QUANTIZATIONS: Mapping[str, Quantization] = {
    "int8": Quantization(8, None, 4),
    "fp8": Quantization(8, None, 4),
    "int4": Quantization(4, 128, 2),
}
"""Projections of the layers only: embeddings, head, norms and biases keep the dtype."""


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Equal parameters: `count` tensors of `rows` x `columns` (columns 1: a vector).

    Attributes:
      axis: the logical axis that tensor parallelism splits, None where the tensor is whole.
      quantized: whether quantisation applies.
    """

    count: int
    rows: int
    columns: int
    axis: str | None
    quantized: bool = False

    @property
    def size(self) -> int:
        """Parameters of the group, all devices together."""
        return self.count * self.rows * self.columns


def parameter_groups(config: "ModelConfig") -> Iterator[ParameterGroup]:
    """Every parameter of the decoder."""
    layers, hidden, dim = config.num_layers, config.hidden_size, config.head_dim
    q, kv, mlp = config.num_heads * dim, config.num_kv_heads * dim, config.intermediate_size
    yield ParameterGroup(layers, q, hidden, "heads", True)
    yield ParameterGroup(2 * layers, kv, hidden, "kv_heads", True)
    yield ParameterGroup(layers, hidden, q, "heads", True)
    yield ParameterGroup(2 * layers, mlp, hidden, "mlp", True)
    yield ParameterGroup(layers, hidden, mlp, "mlp", True)
    yield ParameterGroup(2 * layers + 1, hidden, 1, None)
    if config.attention_bias:
        yield ParameterGroup(layers, q, 1, "heads")
        yield ParameterGroup(2 * layers, kv, 1, "kv_heads")
    if config.output_bias:
        yield ParameterGroup(layers, hidden, 1, None)
    if config.mlp_bias:
        yield ParameterGroup(2 * layers, mlp, 1, "mlp")
        yield ParameterGroup(layers, hidden, 1, None)
    if config.qk_norm:
        yield ParameterGroup(2 * layers, dim, 1, None)
    tables = 1 if config.tie_word_embeddings else 2
    yield ParameterGroup(tables, config.vocab_size, hidden, "vocab")


def weight_bytes(
    config: "ModelConfig", dtype: str, quantization: str | None = None, tp: int = 1
) -> int:
    """Parameter bytes on one of `tp` devices.

    Raises:
      ConfigError: the dtype or quantisation is not known.
    """
    from jaxllm.execution.mesh import axis_rules

    _check_choice("dtype", dtype, DTYPE_BYTES)
    rules = axis_rules(config, tp)
    total = 0
    for group in parameter_groups(config):
        size = group.size
        if quantization is not None and group.quantized:
            total_bytes = _quantized_bytes(group, quantization)
        else:
            total_bytes = size * DTYPE_BYTES[dtype]
        split = group.axis is not None and rules[group.axis] is not None
        total += -(-total_bytes // tp) if split else total_bytes
    return total


def _quantized_bytes(group: ParameterGroup, quantization: str) -> int:
    _check_choice("quantization", quantization, QUANTIZATIONS)
    kind = QUANTIZATIONS[quantization]
    groups_per_row = 1 if kind.group is None else -(-group.columns // kind.group)
    scales = group.count * group.rows * groups_per_row
    return -(-group.size * kind.bits // 8) + scales * kind.scale_bytes


def _check_choice(name: str, value: str, allowed: Mapping[str, object]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r}: one of {', '.join(allowed)}")
