"""The device mesh, and how logical axes of parameters map to it (tensor parallelism)."""

import dataclasses
from collections.abc import Mapping

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxllm.errors import ConfigError
from jaxllm.models.config import ModelConfig

TENSOR_AXIS = "tensor"

# Columns of the first product of a pair and rows of the second: one all-reduce per pair.
SHARDED_AXES = ("heads", "kv_heads", "mlp", "vocab")


def make_mesh(tensor_parallel_size: int) -> Mesh:
    """A one-axis mesh over the first devices of the default backend.

    Raises:
      ConfigError: there are fewer devices.
    """
    devices = jax.devices()
    if tensor_parallel_size > len(devices):
        raise ConfigError(
            f"tensor_parallel_size={tensor_parallel_size}, but there are {len(devices)} "
            f"{devices[0].platform} devices"
        )
    return jax.make_mesh(
        (tensor_parallel_size,),
        (TENSOR_AXIS,),
        axis_types=(AxisType.Auto,),
        devices=devices[:tensor_parallel_size],
    )


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


@dataclasses.dataclass(frozen=True, slots=True)
class HeadLayout:
    """How attention heads lie on the mesh.

    KV heads that do not divide are repeated `kv_repeat` times in the pool (not in the weights), so
    that every device holds the KV heads of its own query heads.
    """

    num_kv_heads: int
    kv_repeat: int

    @classmethod
    def of(cls, config: ModelConfig, tensor_parallel_size: int) -> "HeadLayout":
        """The smallest repetition that divides.

        Raises:
          ConfigError: the query heads do not divide by tensor_parallel_size.
        """
        heads, kv_heads = config.num_heads, config.num_kv_heads
        if heads % tensor_parallel_size:
            raise ConfigError(
                f"tensor_parallel_size={tensor_parallel_size} does not divide the "
                f"{heads} attention heads"
            )
        for repeat in range(1, heads // kv_heads + 1):
            total = kv_heads * repeat
            if heads % total == 0 and total % tensor_parallel_size == 0:
                return cls(total, repeat)
        raise ConfigError(
            f"tensor_parallel_size={tensor_parallel_size}: {kv_heads} KV heads cannot be repeated "
            f"to divide {heads} query heads evenly"
        )


def axis_rules(config: ModelConfig, tensor_parallel_size: int) -> Mapping[str, str | None]:
    """Mesh axis of each logical axis; an axis whose size does not divide is replicated."""
    sizes = {
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "mlp": config.intermediate_size,
        "vocab": config.vocab_size,
    }
    return {
        axis: TENSOR_AXIS if sizes[axis] % tensor_parallel_size == 0 else None
        for axis in SHARDED_AXES
    }


def parameter_sharding(
    mesh: Mesh, rules: Mapping[str, str | None], logical_axes: tuple[str, ...]
) -> NamedSharding:
    """Where a parameter with these logical axes lives; unlisted axes are replicated."""
    return NamedSharding(mesh, PartitionSpec(*(rules.get(axis) for axis in logical_axes)))
