import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.errors import ConfigError
from jaxllm.models.config import ModelConfig
from jaxllm.models.llama import LlamaForCausalLM, causal_attention
from jaxllm.models.registry import ARCHITECTURES, find_family
from tests.models.families import DATA, FAMILIES, load


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_the_recording(name):
    recorded = load(name)

    @jax.jit
    def logits(params, ids):
        return recorded.model.bind(params)(ids, jnp.arange(ids.shape[0]))

    # What comes after a token does not touch it: with a tail, all sequences share one program.
    longest = max(len(ids) for ids, _ in recorded.sequences)
    for ids, expected in recorded.sequences:
        found = logits(recorded.params, np.pad(ids, (0, longest - len(ids))))
        np.testing.assert_allclose(found[: len(ids)], expected, atol=1e-4, rtol=0)


def test_a_batch_of_sequences_is_what_training_calls():
    recorded = load("qwen3")
    model = recorded.model.bind(recorded.params)
    ids = np.stack([ids[:40] for ids, _ in recorded.sequences])
    positions = np.broadcast_to(np.arange(40), ids.shape)
    together = model(jnp.asarray(ids), jnp.asarray(positions))
    for row, (_, expected) in zip(together, recorded.sequences, strict=True):
        np.testing.assert_allclose(row, expected[:40], atol=1e-4, rtol=0)


def test_kept_tokens_and_no_token():
    recorded = load("qwen3")
    ids = jnp.asarray(recorded.sequences[0][0][:12])
    caches = [None] * recorded.model.config.num_layers

    @jax.jit
    def hidden(ids, kept):
        model = recorded.model.bind(recorded.params)
        return model.hidden(ids, jnp.arange(12), causal_attention, caches, kept)[0]

    every = hidden(ids, None)
    kept = hidden(ids, jnp.asarray([11, 3, 12, 99]))
    np.testing.assert_allclose(kept[:2], every[jnp.asarray([11, 3])], atol=1e-5, rtol=1e-5)
    model = recorded.model.bind(recorded.params)
    nothing = model.model.embed_tokens(jnp.asarray([recorded.model.config.vocab_size]))
    np.testing.assert_array_equal(nothing, 0.0)


def test_gradients_reach_every_parameter():
    recorded = load("qwen3")
    ids = jnp.asarray(recorded.sequences[0][0])

    def loss(params):
        return jnp.mean(recorded.model.bind(params)(ids, jnp.arange(ids.shape[0])) ** 2)

    gradients = jax.grad(loss)(recorded.params)
    assert all(float(jnp.max(jnp.abs(g))) > 0 for g in gradients.values())


@pytest.mark.parametrize("name", [n for n in FAMILIES if (DATA / n / "config_v4.json").exists()])
def test_both_spellings_of_rope_scaling_read_alike(name):
    read = find_family(json.loads((DATA / name / "config.json").read_text())).read_config
    configs = [
        read(json.loads((DATA / name / file).read_text()))
        for file in ("config.json", "config_v4.json")
    ]
    assert configs[0] == configs[1]


def test_an_unknown_architecture_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'GPT2LMHeadModel'.*LlamaForCausalLM.*Qwen3"):
        find_family({"architectures": ["GPT2LMHeadModel"]})
    with pytest.raises(ConfigError, match=r"architectures=\[\]"):
        find_family({})


MINIMAL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "rope type 'dynamic'"),
        ({"num_key_value_heads": 3}, "4 attention heads do not divide into 3"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"vocab_size": None}, "vocab_size"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ],
)
def test_what_the_decoder_cannot_honour_is_refused_by_name(change, message):
    hf = {k: v for k, v in {**MINIMAL, **change}.items() if v is not None}
    with pytest.raises(ConfigError, match=message):
        ARCHITECTURES["LlamaForCausalLM"].read_config(hf)


def test_windows_follow_the_families_rules():
    qwen = {**MINIMAL, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 8}
    read = ARCHITECTURES["Qwen2ForCausalLM"].read_config
    assert read(qwen).windows == (None, None)
    assert read({**qwen, "use_sliding_window": True, "max_window_layers": 1}).windows == (None, 8)
    mistral = {**MINIMAL, "sliding_window": 8}
    assert ARCHITECTURES["MistralForCausalLM"].read_config(mistral).windows == (8, 8)
    with pytest.raises(ConfigError, match="chunked_attention"):
        read({**qwen, "use_sliding_window": True, "layer_types": ["chunked_attention"] * 2})


@pytest.mark.parametrize("name", FAMILIES)
def test_num_params_counts_what_is_there(name):
    recorded = load(name)
    assert recorded.model.config.num_params == sum(p.size for p in recorded.params.values())


def test_the_module_stands_alone():
    config: ModelConfig = ARCHITECTURES["LlamaForCausalLM"].read_config(MINIMAL)
    model = LlamaForCausalLM(config, rngs=nnx.Rngs(0))
    logits = model(jnp.arange(5), jnp.arange(5))
    assert logits.shape == (5, 32) and logits.dtype == jnp.float32
    assert bool(jnp.all(jnp.isfinite(logits)))
