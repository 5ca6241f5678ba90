"""The model as a function of a flat dict of arrays, which is what the hot path passes around."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxllm.execution.mesh import axis_rules, parameter_sharding
from jaxllm.models.config import ModelConfig
from jaxllm.models.layers import Ops
from jaxllm.models.registry import ModelFamily

type Params = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class FunctionalModel:
    """A Flax module split into its structure and its parameters' abstract values.

    Attributes:
      config: the model's shapes.
      activation_dtype: dtype of the hidden states.
      abstract: name -> shape, dtype and sharding; names are those of the checkpoint.
      ignored_names: patterns of checkpoint names that carry nothing for this model.
    """

    config: ModelConfig
    activation_dtype: Any
    abstract: dict[str, jax.ShapeDtypeStruct]
    ignored_names: tuple[str, ...]
    _graphdef: Any
    _variables: dict[str, tuple[tuple, nnx.Variable]]

    @classmethod
    def build(
        cls, family: ModelFamily, config: ModelConfig, dtype: Any, mesh: Mesh, ops: Ops
    ) -> "FunctionalModel":
        """Traces the module's constructor; no parameter is allocated."""
        module = nnx.eval_shape(
            lambda: family.module(config, dtype=dtype, ops=ops, rngs=nnx.Rngs(0))
        )
        graphdef, state = nnx.split(module)
        variables = {
            ".".join(str(part) for part in path): (path, variable)
            for path, variable in nnx.to_flat_state(state)
        }
        rules = axis_rules(config, mesh.size)
        abstract = {
            name: jax.ShapeDtypeStruct(
                variable.shape,
                variable.dtype,
                sharding=parameter_sharding(mesh, rules, variable.get_metadata()["logical_axes"]),
            )
            for name, (_, variable) in variables.items()
        }
        return cls(
            config,
            ops.activation_dtype or dtype,
            abstract,
            family.module.ignored_names,
            graphdef,
            variables,
        )

    def bind(self, params: Params) -> Any:
        """The module with these parameters; call it inside a traced function."""
        state = nnx.from_flat_state(
            [(path, var.replace(params[name])) for name, (path, var) in self._variables.items()]
        )
        return nnx.merge(self._graphdef, state)

    @property
    def head_names(self) -> tuple[str, ...]:
        """Parameters that `logits` reads."""
        tied = self.config.tie_word_embeddings
        return ("model.embed_tokens.weight" if tied else "lm_head.weight",)

    def bind_head(self, head_params: Params) -> Any:
        """The module with only `head_names` filled in: for `logits` alone."""
        placeholders: dict[str, Any] = dict(self.abstract)
        return self.bind(placeholders | head_params)

    @property
    def num_bytes_per_device(self) -> int:
        """Parameter bytes on one device."""
        return sum(
            int(jnp.dtype(a.dtype).itemsize) * _size(a.sharding.shard_shape(a.shape))
            for a in self.abstract.values()
        )


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for dim in shape:
        size *= dim
    return size
