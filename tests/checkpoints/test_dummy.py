import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.checkpoints.load import load_params
from jaxllm.checkpoints.resolve import Checkpoint

UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
NORM, BIAS = "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_proj.bias"
SHAPES = {UP: (512, 256), DOWN: (256, 512), NORM: (256,), BIAS: (256,), "model.norm.weight": (256,)}


def load(tmp_path, dtype=jnp.float32, sharding_of=lambda name: None, seed=0):
    abstract = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding_of(name))
        for name, shape in SHAPES.items()
    }
    return load_params(Checkpoint("dummy", tmp_path, {}, {}, "m"), abstract, seed=seed)


def test_scale_and_distribution(tmp_path):
    params = load(tmp_path)
    for name in (UP, DOWN):
        value = np.asarray(params[name], np.float64) * SHAPES[name][1] ** 0.5
        assert abs(value.mean()) < 0.01
        assert abs(value.std() - 1) < 0.01
        assert 0.66 < (np.abs(value) < 1).mean() < 0.70  # normal: 0.683
        # Neither neighbours nor rows repeat each other.
        assert abs((value[:, 1:] * value[:, :-1]).mean()) < 0.01
        assert abs((value[1:] * value[:-1]).mean()) < 0.01
    for name in (NORM, "model.norm.weight"):
        np.testing.assert_array_equal(np.asarray(params[name]), 1)
    np.testing.assert_array_equal(np.asarray(params[BIAS]), 0)


def test_depends_on_seed_and_name_only(tmp_path, mesh):
    plain, again, other = load(tmp_path), load(tmp_path), load(tmp_path, seed=1)
    specs = {UP: PartitionSpec("tensor"), DOWN: PartitionSpec(None, "tensor")}
    sharded = load(
        tmp_path, sharding_of=lambda n: NamedSharding(mesh(4), specs.get(n, PartitionSpec()))
    )
    for name in SHAPES:
        np.testing.assert_array_equal(np.asarray(plain[name]), np.asarray(again[name]))
        np.testing.assert_array_equal(np.asarray(plain[name]), np.asarray(sharded[name]))
    assert sharded[UP].addressable_shards[0].data.shape == (128, 256)
    assert sharded[DOWN].addressable_shards[0].data.shape == (256, 128)
    for a, b in ((plain[UP], other[UP]), (plain[UP].ravel(), plain[DOWN].ravel())):
        assert abs(np.corrcoef(np.asarray(a).ravel(), np.asarray(b).ravel())[0, 1]) < 0.02


def test_dtype(tmp_path):
    half, single = load(tmp_path, jnp.bfloat16), load(tmp_path)
    for name, value in half.items():
        assert value.dtype == jnp.bfloat16
        np.testing.assert_array_equal(
            np.asarray(value), np.asarray(single[name].astype(jnp.bfloat16))
        )
