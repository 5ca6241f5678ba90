"""The model as a function of a flat dict of arrays, which is what the hot path passes around."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxllm.execution.gradients import log_normalizer
from jaxllm.execution.mesh import axis_rules, parameter_sharding
from jaxllm.models.config import ModelConfig
from jaxllm.models.layers import Ops
from jaxllm.models.llama import Attend, causal_attention
from jaxllm.models.registry import ModelFamily

type Params = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class FunctionalModel:
    """A Flax module split into its structure and its parameters' abstract values.

    Attributes:
      config: the model's shapes.
      activation_dtype: dtype of the hidden states.
      abstract: name -> shape, dtype and sharding; names are those of the checkpoint.
      source: the same of the parameters that are loaded: `abstract`, unless the model keeps its
        matrices as int8 (`execution.quantization.prepare`).
      ignored_names: patterns of checkpoint names that carry nothing for this model.
      attend: attention over whole sequences, for `apply`.
    """

    config: ModelConfig
    activation_dtype: Any
    abstract: dict[str, jax.ShapeDtypeStruct]
    source: dict[str, jax.ShapeDtypeStruct]
    ignored_names: tuple[str, ...]
    _graphdef: Any
    _variables: dict[str, tuple[tuple, nnx.Variable]]
    attend: Attend = causal_attention

    @classmethod
    def build(
        cls,
        family: ModelFamily,
        config: ModelConfig,
        dtype: Any,
        mesh: Mesh,
        ops: Ops,
        attend: Attend = causal_attention,
    ) -> "FunctionalModel":
        """Traces the module's constructor; no parameter is allocated."""
        rules = axis_rules(config, mesh.size)

        def trace(ops: Ops) -> tuple[Any, dict[str, Any], dict[str, jax.ShapeDtypeStruct]]:
            module = nnx.eval_shape(
                lambda: family.module(config, dtype=dtype, ops=ops, rngs=nnx.Rngs(0))
            )
            graphdef, state = nnx.split(module)
            variables = {
                ".".join(str(part) for part in path): (path, variable)
                for path, variable in nnx.to_flat_state(state)
            }
            abstract = {
                name: jax.ShapeDtypeStruct(
                    variable.shape,
                    variable.dtype,
                    sharding=parameter_sharding(
                        mesh, rules, variable.get_metadata()["logical_axes"]
                    ),
                )
                for name, (_, variable) in variables.items()
            }
            return graphdef, variables, abstract

        graphdef, variables, abstract = trace(ops)
        source = abstract
        if ops.int8_weights:
            source = trace(dataclasses.replace(ops, int8_weights=False))[2]
        return cls(
            config,
            ops.activation_dtype or dtype,
            abstract,
            source,
            family.module.ignored_names,
            graphdef,
            variables,
            attend,
        )

    def bind(self, params: Params) -> Any:
        """The module with these parameters; the hot path does so inside a traced function."""
        state = nnx.from_flat_state(
            [(path, var.replace(params[name])) for name, (path, var) in self._variables.items()]
        )
        return nnx.merge(self._graphdef, state)

    def module(self, params: Params) -> Any:
        """The Flax module that holds these arrays, for training: `nnx.state(module)` has them under
        the checkpoint's names, and goes to `LLM.update_weights` as it is."""
        return self.bind(params)

    def apply(
        self, params: Params, token_ids: jax.Array, positions: jax.Array | None = None
    ) -> jax.Array:
        """Whole sequences without a cache, a pure function of the parameters.

        Args:
          params: name -> array, as `abstract` says; the dtype may be any float.
          token_ids: int32 [..., S], sequences padded at their end.
          positions: int32 [..., S]; 0 to S - 1 if not given.

        Returns:
          Logits float32 [..., S, V].
        """
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(token_ids.shape[-1]), token_ids.shape)
        module, caches = self.bind(params), [None] * self.config.num_layers
        hidden, _ = module.hidden(token_ids, positions, self.attend, caches)
        logits: jax.Array = module.logits(hidden)
        return logits

    def token_logprobs(self, params: Params, token_ids: jax.Array) -> jax.Array:
        """Log probability of every token but the first given those before it: int32 [..., S] ->
        float32 [..., S - 1], natural logarithms."""
        logits = self.apply(params, token_ids)[..., :-1, :]
        chosen = jnp.take_along_axis(logits, token_ids[..., 1:, None], axis=-1)[..., 0]
        return chosen - log_normalizer(logits)

    @property
    def head_names(self) -> tuple[str, ...]:
        """Parameters that `logits` reads."""
        tied = self.config.tie_word_embeddings
        name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        return tuple(part for part in (name, f"{name}_scale") if part in self.abstract)

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
