import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxllm.checkpoints.errors import CheckpointError, TensorMismatchError, UnsupportedFormatError
from jaxllm.checkpoints.load import load_params, read_params
from jaxllm.checkpoints.resolve import resolve
from jaxllm.checkpoints.safetensors import SafetensorsFolder

EMBED, DOWN = "model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"


class CountingSource:
    """Passes reads on and remembers them."""

    def __init__(self, source):
        self._source = source
        self.tensors = source.tensors
        self.reads = []

    def read(self, name, index, dtype):
        self.reads.append((name, index))
        return self._source.read(name, index, dtype)


def abstract_of(tensors, sharding_of, dtype=jnp.float32):
    return {
        name: jax.ShapeDtypeStruct(value.shape, dtype, sharding=sharding_of(name))
        for name, value in tensors.items()
    }


def rule(mesh):
    """Rows of the embedding, columns of the down projection, everything else replicated."""
    specs = {EMBED: PartitionSpec("tensor", None), DOWN: PartitionSpec(None, "tensor")}
    return lambda name: NamedSharding(mesh, specs.get(name, PartitionSpec()))


@pytest.mark.parametrize("sizes", [(1,), (2,), (4,), (2, 2)])
@pytest.mark.parametrize("shards", [0, 2])
def test_sharded_parameters_equal_the_stored_ones(sizes, shards, tensors, write_folder, mesh):
    checkpoint = resolve(write_folder(tensors, shards=shards))
    abstract = abstract_of(tensors, rule(mesh(*sizes)))
    params = load_params(checkpoint, abstract, progress=False)
    assert list(params) == list(abstract)
    for name, value in tensors.items():
        assert params[name].dtype == jnp.float32
        assert params[name].sharding == abstract[name].sharding
        np.testing.assert_array_equal(np.asarray(params[name]), value.astype(np.float32))
        for shard in params[name].addressable_shards:
            np.testing.assert_array_equal(
                np.asarray(shard.data), value.astype(np.float32)[shard.index]
            )


def test_default_and_single_device_placement(tensors, write_folder):
    checkpoint = resolve(write_folder(tensors))
    device = jax.devices()[3]
    placed = load_params(
        checkpoint, abstract_of(tensors, lambda _: SingleDeviceSharding(device)), progress=False
    )
    free = load_params(checkpoint, abstract_of(tensors, lambda _: None), progress=False)
    assert placed[EMBED].devices() == {device}
    assert free[EMBED].devices() == {jax.devices()[0]}
    # Uncommitted: it follows what it is used with.
    assert (free[EMBED] + placed[EMBED]).devices() == {device}


def test_each_distinct_slice_is_read_once(tensors, write_folder, mesh):
    source = CountingSource(SafetensorsFolder(write_folder(tensors)))
    read_params(source, abstract_of(tensors, rule(mesh(2, 2))))
    expected = [(name, tuple((0, n) for n in value.shape)) for name, value in tensors.items()]
    expected = [read for read in expected if read[0] not in (EMBED, DOWN)]
    expected += [(EMBED, ((0, 16), (0, 16))), (EMBED, ((16, 32), (0, 16)))]
    expected += [(DOWN, ((0, 16), (0, 32))), (DOWN, ((0, 16), (32, 64)))]
    assert sorted(source.reads) == sorted(expected)


def test_host_holds_two_slices_at_most(monkeypatch, write_folder, mesh):
    """Of 8 tensors in 4 slices each, at most one per reader waits for its device."""
    tensors = {f"w{i}": np.full((64, 64), i, np.float32) for i in range(8)}
    source = SafetensorsFolder(write_folder(tensors))
    sharding = NamedSharding(mesh(4), PartitionSpec("tensor"))
    alive, peak, read, wait = set(), [0], source.read, jax.block_until_ready

    class Slice(np.ndarray):
        def __array_finalize__(self, base):
            alive.add(id(self))
            peak[0] = max(peak[0], len(alive))

        def __del__(self):
            alive.discard(id(self))

    class Source:
        tensors = source.tensors

        def read(self, *args):
            return read(*args).view(Slice)

    def copied(value, device):
        # A plain copy, so that only the loader's own reference keeps a slice alive.
        return jnp.array(np.array(value, subok=False), device=device)

    monkeypatch.setattr(jax, "device_put", copied)
    params = read_params(Source(), abstract_of(tensors, lambda _: sharding))
    wait(params)
    assert 1 <= peak[0] <= 2  # one per reader
    assert not alive


def test_names_of_all_that_does_not_fit(tensors, write_folder):
    checkpoint = resolve(write_folder(tensors))
    abstract = abstract_of(tensors, lambda _: None)
    abstract["model.layers.1.mlp.up_proj.weight"] = jax.ShapeDtypeStruct((2,), jnp.float32)
    abstract[EMBED] = jax.ShapeDtypeStruct((33, 16), jnp.float32)
    del abstract[DOWN]
    with pytest.raises(TensorMismatchError) as caught:
        load_params(checkpoint, abstract, progress=False)
    error = caught.value
    assert error.missing == ("model.layers.1.mlp.up_proj.weight",)
    assert error.surplus == (DOWN,)
    assert error.wrong_shape == (f"{EMBED}: found (32, 16), expected (33, 16)",)
    for name in (*error.missing, *error.surplus, EMBED, checkpoint.name):
        assert name in str(error)


def test_long_lists_of_names_are_cut(tensors, write_folder):
    many = tensors | {f"extra.{i:02}": np.zeros(1, np.float32) for i in range(25)}
    checkpoint = resolve(write_folder(many))
    with pytest.raises(TensorMismatchError, match=r"25 not part.*extra\.09 and 15 more") as caught:
        load_params(checkpoint, abstract_of(tensors, lambda _: None), progress=False)
    assert "extra.10" not in str(caught.value)
    assert len(caught.value.surplus) == 25


def test_ignored_names(tensors, write_folder):
    extra = {
        "lm_head.weight": np.zeros((32, 16), np.float32),  # tied, by the configuration
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32),
        "vision.a": np.zeros(1, np.float32),
    }
    checkpoint = resolve(write_folder(tensors | extra))
    abstract = abstract_of(tensors, lambda _: None)
    with pytest.raises(TensorMismatchError) as caught:
        load_params(checkpoint, abstract, progress=False)
    assert caught.value.surplus == ("vision.a",)
    params = load_params(checkpoint, abstract, ignore=["vision.*"], progress=False)
    assert set(params) == set(tensors)


def test_quantised_safetensors_are_refused_by_method(tensors, write_folder):
    folder = write_folder(tensors)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedFormatError, match=r"'awq'.*GGUF"):
        load_params(resolve(folder), abstract_of(tensors, lambda _: None), progress=False)


def test_an_error_while_reading_ends_the_load(tensors, write_folder):
    source = SafetensorsFolder(write_folder(tensors))

    class Failing:
        tensors = source.tensors

        def read(self, name, index, dtype):
            if name == DOWN:
                raise CheckpointError(f"cannot read {name}")
            return source.read(name, index, dtype)

    with pytest.raises(CheckpointError, match=DOWN):
        read_params(Failing(), abstract_of(tensors, lambda _: None))


def test_progress_counts_bytes(tensors, write_folder, capsys):
    load_params(resolve(write_folder(tensors)), abstract_of(tensors, lambda _: None))
    shown = capsys.readouterr().err
    total = sum(4 * math.prod(value.shape) for value in tensors.values())
    assert "Loading weights: 100%" in shown
    assert f"{total / 1024:.2f}k" in shown
