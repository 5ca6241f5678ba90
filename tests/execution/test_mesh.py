import jax
import pytest

from jaxllm.errors import ConfigError
from jaxllm.execution.mesh import HeadLayout, axis_rules, make_mesh, parameter_sharding
from jaxllm.models.config import ModelConfig
from jaxllm.models.rope import RopeConfig


def config(heads, kv_heads, vocab=128, inner=64) -> ModelConfig:
    return ModelConfig(vocab, 32, inner, 2, heads, kv_heads, 8, 64, 1e-6, RopeConfig(1e4))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "devices", "total", "repeat"),
    [(8, 8, 4, 8, 1), (8, 2, 4, 4, 2), (8, 1, 8, 8, 8), (12, 3, 2, 6, 2), (9, 3, 3, 3, 1)],
)
def test_kv_heads_are_repeated_until_they_divide(heads, kv_heads, devices, total, repeat):
    layout = HeadLayout.of(config(heads, kv_heads), devices)
    assert (layout.num_kv_heads, layout.kv_repeat) == (total, repeat)


def test_query_heads_must_divide():
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 does not divide the 9"):
        HeadLayout.of(config(9, 3), 2)


def test_axes_that_do_not_divide_are_replicated():
    rules = axis_rules(config(8, 2, vocab=127, inner=64), 4)
    assert rules == {"heads": "tensor", "kv_heads": None, "mlp": "tensor", "vocab": None}


def test_columns_then_rows():
    mesh = make_mesh(2)
    rules = axis_rules(config(8, 8), 2)
    column = parameter_sharding(mesh, rules, ("heads", "embed"))
    row = parameter_sharding(mesh, rules, ("embed", "heads"))
    assert column.shard_shape((64, 32)) == (32, 32)
    assert row.shard_shape((32, 64)) == (32, 32)


def test_more_devices_than_there_are():
    with pytest.raises(ConfigError, match=f"there are {len(jax.devices())} cpu devices"):
        make_mesh(1000)
