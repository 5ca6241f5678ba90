"""Decoder of the Llama family: Llama 2 and 3, Mistral, SmolLM2, Qwen2, Qwen3.

The model knows nothing of how K and V are kept. It hands q, k and v of each layer, with that
layer's cache, to an `attend` function and goes on with what that returns: the engine passes one
that reads and writes the paged pool, training passes `causal_attention` and no caches.
"""

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.models.config import ModelConfig
from jaxllm.models.layers import Embedding, Linear, Ops, RMSNorm, take_rows
from jaxllm.models.rope import apply_rope, rope_tables


class Attend(Protocol):
    """Attention of one layer: q [..., H, D], k and v [..., K, D], and the layer's cache (any
    pytree) -> [..., H, D] and the cache with k and v in it. Hashable, since layers are traced
    once for all that are alike."""

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: Any, window: int | None
    ) -> tuple[jax.Array, Any]: ...


def causal_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: None = None, window: int | None = None
) -> tuple[jax.Array, None]:
    """Dense causal attention over whole sequences, [..., S, heads, D], without a cache."""
    length, groups = q.shape[-3], q.shape[-2] // k.shape[-2]
    k, v = (jnp.repeat(x.astype(jnp.float32), groups, axis=-2) for x in (k, v))
    scores = jnp.einsum("...qhd,...khd->...hqk", q.astype(jnp.float32), k) * q.shape[-1] ** -0.5
    distance = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
    visible = (distance >= 0) & (distance < (length if window is None else window))
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return jnp.einsum("...hqk,...khd->...qhd", weights, v).astype(q.dtype), None


class Attention(nnx.Module):
    def __init__(self, config: ModelConfig, layer: int, ops: Ops, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        self.ops = ops
        self.window = config.windows[layer]
        hidden, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
        self.q_proj = Linear(hidden, q_size, ("heads", "embed"), ops, dtype, rngs, bias)
        self.k_proj = Linear(hidden, kv_size, ("kv_heads", "embed"), ops, dtype, rngs, bias)
        self.v_proj = Linear(hidden, kv_size, ("kv_heads", "embed"), ops, dtype, rngs, bias)
        self.o_proj = Linear(
            q_size, hidden, ("embed", "heads"), ops, dtype, rngs, config.output_bias
        )
        if config.qk_norm:
            self.q_norm = RMSNorm(dim, config.rms_norm_eps, ops, dtype, axis="head_dim")
            self.k_norm = RMSNorm(dim, config.rms_norm_eps, ops, dtype, axis="head_dim")

    def __call__(
        self,
        x: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        attend: Attend,
        cache: Any,
        kept: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """x [..., hidden] -> [..., hidden], or its kept rows, and the cache; cos and sin
        [..., 1, D / 2]."""
        config = self.config
        heads = (*x.shape[:-1], -1, config.head_dim)
        q, k, v = (proj(x).reshape(heads) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (apply_rope(x, cos, sin, self.ops.apart) for x in (q, k))
        out, cache = attend(q, k, v, cache, self.window)
        return self.o_proj(take_rows(out.reshape(*x.shape[:-1], -1), kept)), cache


class MLP(nnx.Module):
    """SwiGLU (arXiv 2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, ops: Ops, dtype: DTypeLike, rngs: nnx.Rngs):
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(hidden, inner, ("mlp", "embed"), ops, dtype, rngs, bias)
        self.up_proj = Linear(hidden, inner, ("mlp", "embed"), ops, dtype, rngs, bias)
        self.down_proj = Linear(inner, hidden, ("embed", "mlp"), ops, dtype, rngs, bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nnx.Module):
    def __init__(self, config: ModelConfig, layer: int, ops: Ops, dtype: DTypeLike, rngs: nnx.Rngs):
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps, ops, dtype)
        self.self_attn = Attention(config, layer, ops, dtype, rngs)
        self.post_attention_layernorm = RMSNorm(hidden, eps, ops, dtype)
        self.mlp = MLP(config, ops, dtype, rngs)

    def __call__(
        self,
        x: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        attend: Attend,
        cache: Any,
        kept: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """x [..., hidden] -> [..., hidden] and the cache. With kept, int32 [N], x is [T, hidden]
        and the result [N, hidden]: of those rows alone; T and above stand for none."""
        out, cache = self.self_attn(self.input_layernorm(x), cos, sin, attend, cache, kept)
        x = take_rows(x, kept) + out
        return x + self.mlp(self.post_attention_layernorm(x)), cache


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run_layer(
    graphdef: Any,
    attend: Attend,
    state: nnx.State,
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    cache: Any,
    kept: jax.Array | None,
) -> tuple[jax.Array, Any]:
    """A layer as a jitted function, so that a deep model is traced and lowered layer by kind."""
    return nnx.merge(graphdef, state)(x, cos, sin, attend, cache, kept)


class Decoder(nnx.Module):
    def __init__(self, config: ModelConfig, ops: Ops, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        self.ops = ops
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, ops, dtype, rngs)
        self.layers = nnx.List(
            DecoderLayer(config, i, ops, dtype, rngs) for i in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops, dtype)

    def __call__(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        attend: Attend,
        caches: Sequence[Any],
        kept: jax.Array | None = None,
    ) -> tuple[jax.Array, list[Any]]:
        x = self.embed_tokens(token_ids)
        x = x.astype(self.ops.activation_dtype or x.dtype)
        tables = rope_tables(positions, *self.config.rope.frequencies(self.config.head_dim))
        # Without the barrier XLA computes the sines anew in every layer.
        cos, sin = jax.lax.optimization_barrier(tables)
        new_caches = []
        for layer, cache in zip(self.layers, caches, strict=True):
            graphdef, state = nnx.split(layer)
            of_layer = kept if layer is self.layers[-1] else None
            x, new_cache = _run_layer(graphdef, attend, state, x, cos, sin, cache, of_layer)
            new_caches.append(new_cache)
        return self.norm(x), new_caches


class LlamaForCausalLM(nnx.Module):
    """Decoder with a language-model head.

    Args:
      config: shapes and options.
      dtype: dtype of the weights.
      ops: the arithmetic to build with; the default is plain JAX.
    """

    # Shell patterns of names a checkpoint may hold that carry no weight of ours.
    ignored_names = ("*.rotary_emb.inv_freq",)

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        ops: Ops = Ops(),  # noqa: B008 - frozen
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.model = Decoder(config, ops, dtype, rngs)
        self.ops = ops
        if not config.tie_word_embeddings:
            self.lm_head = Linear(
                config.hidden_size, config.vocab_size, ("vocab", "embed"), ops, dtype, rngs
            )

    def hidden(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        attend: Attend,
        caches: Sequence[Any],
        kept: jax.Array | None = None,
    ) -> tuple[jax.Array, list[Any]]:
        """Last hidden states, normalised: int32 [...] ids and positions, and a cache per layer
        -> [..., hidden] and the new caches.

        With kept, int32 [N], the tokens are [T] and the states [N, hidden], those of these tokens
        alone: the last layer needs the others only for their K and V. An id of V or above, and a
        kept token of T or above, stand for none: rows of zeros go through the layers there.
        """
        return self.model(token_ids, positions, attend, caches, kept)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., hidden] -> float32 [..., V]."""
        tied = self.config.tie_word_embeddings
        head = self.model.embed_tokens if tied else self.lm_head
        return head.multiply(hidden).astype(jnp.float32)

    def __call__(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """Whole sequences without a cache: int32 [..., S] -> float32 logits [..., S, V]."""
        caches = [None] * self.config.num_layers
        hidden, _ = self.hidden(token_ids, positions, causal_attention, caches)
        return self.logits(hidden)
