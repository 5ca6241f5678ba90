import numpy as np
import pytest

from jaxllm.checkpoints.errors import CorruptFileError, UnsupportedFormatError
from jaxllm.checkpoints.gguf_config import config_from_gguf, generation_config_from_gguf
from jaxllm.checkpoints.gguf_file import GGUFFile
from tests.checkpoints.gguf_files import layer_tensors, write_gguf


@pytest.fixture
def config_of(tmp_path):
    def config(*args, **kwargs):
        return config_from_gguf(GGUFFile(write_gguf(tmp_path / "a.gguf", *args, **kwargs)))

    return config


def test_llama(config_of):
    config = config_of(
        integers={"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    )
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def test_untied_output(config_of):
    tensors = layer_tensors()
    config = config_of(tensors=tensors | {"output.weight": tensors["token_embd.weight"]})
    assert config["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("arch", "architecture", "bias"),
    [("qwen2", "Qwen2ForCausalLM", True), ("qwen3", "Qwen3ForCausalLM", False)],
)
def test_qwen(arch, architecture, bias, config_of):
    config = config_of(arch, sizes={"attention.key_length": 16})
    assert config["architectures"] == [architecture]
    assert config["model_type"] == arch
    assert config["attention_bias"] is bias
    assert config["head_dim"] == 16


def test_head_dim_other_than_hidden_by_heads(config_of):
    sizes = {"attention.key_length": 32, "rope.dimension_count": 32}
    assert config_of("qwen3", sizes=sizes)["head_dim"] == 32


def test_sliding_window_makes_it_mistral(config_of):
    config = config_of(sizes={"attention.sliding_window": 48})
    assert config["architectures"] == ["MistralForCausalLM"]
    assert config["model_type"] == "mistral"
    assert config["sliding_window"] == 48


def test_defaults_of_absent_keys(config_of):
    config = config_of(
        sizes={"attention.head_count_kv": None, "rope.dimension_count": None},
        numbers={"rope.freq_base": None},
    )
    assert config["num_key_value_heads"] == 4
    assert config["rope_theta"] == 10000.0


def test_head_counts_by_layer(config_of):
    assert config_of(sizes={"attention.head_count_kv": [2, 2]})["num_key_value_heads"] == 2
    with pytest.raises(UnsupportedFormatError, match=r"head_count_kv is \[2, 4\]"):
        config_of(sizes={"attention.head_count_kv": [2, 4]})


def test_linear_and_yarn_scaling(config_of):
    linear = config_of(texts={"rope.scaling.type": "linear"}, numbers={"rope.scaling.factor": 4.0})
    assert linear["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    yarn = config_of(
        texts={"rope.scaling.type": "yarn"},
        numbers={"rope.scaling.factor": 4.0, "rope.scaling.yarn_beta_fast": 16.0},
        sizes={"rope.scaling.original_context_length": 32},
    )
    assert yarn["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
    }


def test_other_scalings_are_refused_by_name(config_of):
    with pytest.raises(UnsupportedFormatError, match="'longrope'; known are none, linear, yarn"):
        config_of(texts={"rope.scaling.type": "longrope"})
    with pytest.raises(UnsupportedFormatError, match="log multiplier"):
        config_of(
            texts={"rope.scaling.type": "yarn"},
            numbers={"rope.scaling.yarn_log_multiplier": 0.1},
        )
    with pytest.raises(UnsupportedFormatError, match="rotates 8 of the 16"):
        config_of(sizes={"rope.dimension_count": 8})


def llama3_factors(head_dim, factor, base=500000.0):
    """Llama 3.1's rule, by wavelength, as published in its reference code."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * base ** (i / head_dim)
        if wavelength < 8192 / 4.0:
            factors.append(1.0)
        elif wavelength > 8192 / 1.0:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered(factor, config_of):
    factors = llama3_factors(128, factor)
    assert len(np.unique(factors)) > 3  # the interpolated part is there
    config = config_of(
        tensors=layer_tensors() | {"rope_freqs.weight": factors},
        sizes={"attention.key_length": 128, "rope.dimension_count": 128},
    )
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_rope_freqs_of_ones_change_nothing(config_of):
    ones = {"rope_freqs.weight": np.ones(8, np.float32)}
    assert config_of(tensors=layer_tensors() | ones)["rope_scaling"] is None


def test_other_rope_freqs_are_refused(config_of):
    sizes = {"attention.key_length": 128, "rope.dimension_count": 128}
    factors = llama3_factors(128, 8.0)
    factors[-30] *= 1.0001
    with pytest.raises(UnsupportedFormatError, match=r"rope_freqs.weight is not Llama 3's"):
        config_of(tensors=layer_tensors() | {"rope_freqs.weight": factors}, sizes=sizes)
    with pytest.raises(CorruptFileError, match=r"rope_freqs.weight has shape"):
        config_of(tensors=layer_tensors() | {"rope_freqs.weight": factors[:7]})
    with pytest.raises(UnsupportedFormatError, match="both rope_freqs"):
        config_of(
            tensors=layer_tensors() | {"rope_freqs.weight": np.ones(8, np.float32)},
            texts={"rope.scaling.type": "linear"},
        )


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "attention.head_count"])
def test_missing_key_is_named(key, config_of):
    with pytest.raises(CorruptFileError, match=f"lacks the key llama.{key}"):
        config_of(sizes={key: None})


def test_nonsense_values_are_refused(config_of):
    with pytest.raises(CorruptFileError, match="0 query heads"):
        config_of(sizes={"attention.head_count": 0})
    with pytest.raises(UnsupportedFormatError, match=r"rope\.freq_base is nan"):
        config_of(numbers={"rope.freq_base": float("nan")})
    tensors = layer_tensors()
    del tensors["token_embd.weight"]
    with pytest.raises(CorruptFileError, match=r"no matrix token_embd.weight"):
        config_of(tensors=tensors)


def test_generation_config(tmp_path):
    path = write_gguf(
        tmp_path / "a.gguf",
        integers={
            "tokenizer.ggml.eos_token_id": 7,
            "tokenizer.ggml.eot_token_id": 9,
            "tokenizer.ggml.eom_token_id": 7,
            "general.sampling.top_k": 20,
        },
        numbers={"general.sampling.temp": 0.7},
    )
    assert generation_config_from_gguf(GGUFFile(path)) == {
        "eos_token_id": [7, 9],
        "top_k": 20,
        "temperature": 0.7,
    }
