import jax
import jax.numpy as jnp
import pytest

from jaxllm.errors import ConfigError
from jaxllm.execution.mesh import make_mesh
from jaxllm.execution.ops import choose_ops
from jaxllm.execution.parameters import FunctionalModel
from jaxllm.models.registry import find_family
from jaxllm.planning.models_table import MODELS, find_model
from jaxllm.planning.weights import parameter_groups, weight_bytes


def config_of(name):
    hf = MODELS[name]
    return find_family(hf).read_config(hf)


@pytest.mark.parametrize("name", MODELS)
def test_the_groups_are_all_the_parameters(name):
    config = config_of(name)
    assert sum(group.size for group in parameter_groups(config)) == config.num_params
    assert weight_bytes(config, "bfloat16") == 2 * config.num_params


# Parameters in all, from the models' own descriptions (safetensors metadata on the Hub).
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("mistral-7b", 7_248_023_552),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-3b", 3_085_938_688),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen2.5-72b", 72_706_203_648),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-32b", 32_762_123_264),
        ("smollm2-135m", 134_515_008),
        ("smollm2-360m", 361_821_120),
        ("smollm2-1.7b", 1_711_376_384),
    ],
)
def test_the_table_gives_the_published_counts(name, count):
    assert config_of(name).num_params == count


def test_names_are_found_however_they_are_written():
    assert find_model("Llama-3.1-8B-Instruct") == MODELS["llama-3.1-8b"]
    assert find_model("no-such-model") is None


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen3-0.6b", "llama-3.1-8b"])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_bytes_are_those_of_the_sharded_model(name, tp):
    if len(jax.devices()) < tp:
        pytest.skip("needs fake devices")
    hf = MODELS[name] | {"num_hidden_layers": 2}
    family = find_family(hf)
    config = family.read_config(hf)
    if config.num_heads % tp:
        pytest.skip("the heads do not divide")
    model = FunctionalModel.build(
        family, config, jnp.bfloat16, make_mesh(tp), choose_ops("gpu", tp)
    )
    assert weight_bytes(config, "bfloat16", tp=tp) == model.num_bytes_per_device


def test_quantised_layers_shrink_and_embeddings_stay():
    config = config_of("llama-3.1-8b")
    whole = weight_bytes(config, "bfloat16")
    tables = 2 * 2 * config.vocab_size * config.hidden_size
    int8, int4 = (weight_bytes(config, "bfloat16", kind) for kind in ("int8", "int4"))
    assert 0.5 < (int8 - tables) / (whole - tables) < 0.502
    # A 16-bit scale per 128 weights of 4 bits: 4.125 bits of 16.
    assert (int4 - tables) / (whole - tables) == pytest.approx(4.125 / 16, rel=1e-3)


def test_unknown_kinds_are_refused():
    config = config_of("smollm2-135m")
    with pytest.raises(ConfigError, match="int3"):
        weight_bytes(config, "bfloat16", "int3")
    with pytest.raises(ConfigError, match="float8"):
        weight_bytes(config, "float8")
