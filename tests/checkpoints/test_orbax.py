import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.checkpoints import orbax
from jaxllm.checkpoints.errors import (
    CheckpointError,
    CorruptFileError,
    NotFoundError,
    TensorMismatchError,
)
from jaxllm.checkpoints.load import load_params
from jaxllm.checkpoints.orbax import convert, stored_tensors
from jaxllm.checkpoints.resolve import ORBAX_MARKER, checkpoint_dtype, resolve
from tests.checkpoints.gguf_files import layer_tensors, write_gguf

EMBED, DOWN = "model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def source(tensors, write_folder):
    folder = write_folder(tensors | {"lm_head.weight": np.zeros((32, 16), np.float32)})
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "modeling_x.py").write_text("raise RuntimeError")
    return folder


def test_round_trip_sharded(source, tensors, tmp_path, mesh):
    dest = convert(source, tmp_path / "out" / "model", progress=False)
    checkpoint = resolve(dest)
    assert checkpoint.format == "orbax"
    assert checkpoint.config == resolve(source).config
    assert checkpoint.generation_config == {"eos_token_id": 2}
    assert sorted(path.name for path in dest.iterdir()) == sorted(
        [
            "params",
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            ORBAX_MARKER,
        ]
    )
    specs = {EMBED: PartitionSpec("tensor"), DOWN: PartitionSpec(None, "tensor")}
    for devices, dtype in ((1, jnp.float32), (4, jnp.bfloat16)):
        abstract = {
            name: jax.ShapeDtypeStruct(
                value.shape,
                dtype,
                sharding=NamedSharding(mesh(devices), specs.get(name, PartitionSpec())),
            )
            for name, value in tensors.items()
        }
        params = load_params(checkpoint, abstract, progress=False)
        assert list(params) == list(abstract)
        for name, value in tensors.items():
            assert params[name].sharding == abstract[name].sharding
            assert params[name].dtype == dtype
            np.testing.assert_array_equal(
                np.asarray(params[name]), np.asarray(jnp.asarray(value).astype(dtype))
            )


def test_default_placement_and_subset(source, tensors, tmp_path):
    checkpoint = resolve(convert(source, tmp_path / "out", progress=False))
    abstract = {EMBED: jax.ShapeDtypeStruct((32, 16), jnp.float32)}
    with pytest.raises(TensorMismatchError, match=r"model\.norm\.weight"):
        load_params(checkpoint, abstract)
    params = load_params(checkpoint, abstract, ignore=["model.layers.*", "model.norm.weight"])
    np.testing.assert_array_equal(np.asarray(params[EMBED]), np.asarray(tensors[EMBED], np.float32))
    assert params[EMBED].dtype == jnp.float32


def test_stored_types(source, tensors, tmp_path):
    kept = resolve(convert(source, tmp_path / "kept", progress=False))
    assert {name: leaf.dtype for name, leaf in stored_tensors(kept).items()} == {
        name: value.dtype for name, value in tensors.items()
    }
    cast = resolve(convert(source, tmp_path / "cast", "float16", progress=False))
    assert {leaf.dtype for leaf in stored_tensors(cast).values()} == {np.dtype(np.float16)}
    assert checkpoint_dtype(cast) == "float16"
    # A converted folder can be converted again.
    again = resolve(convert(tmp_path / "cast", tmp_path / "again", "float32", progress=False))
    assert {leaf.dtype for leaf in stored_tensors(again).values()} == {np.dtype(np.float32)}


def test_gguf_source(tmp_path):
    kinds = {name: GGMLQuantizationType.Q8_0 for name in layer_tensors() if "ffn_" in name}
    kinds.pop("blk.0.ffn_norm.weight")
    path = write_gguf(tmp_path / "a.gguf", kinds=kinds)
    dest = convert(path, tmp_path / "model", progress=False)
    stored = stored_tensors(resolve(dest))
    assert stored["model.layers.0.mlp.up_proj.weight"].dtype == jnp.bfloat16
    assert stored["model.norm.weight"].dtype == jnp.float32
    abstract = {name: jax.ShapeDtypeStruct(s.shape, jnp.bfloat16) for name, s in stored.items()}
    ours, theirs = (load_params(resolve(p), abstract, progress=False) for p in (dest, path))
    for name, value in theirs.items():
        np.testing.assert_array_equal(np.asarray(ours[name]), np.asarray(value))


def test_interrupted_conversion_leaves_nothing(source, tmp_path, monkeypatch):
    dest = tmp_path / "out" / "model"

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(orbax, "_write_tokenizer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert(source, dest, progress=False)
    assert list(dest.parent.iterdir()) == []


def test_killed_conversion_does_not_resolve(source, tmp_path, monkeypatch):
    """What a kill leaves at each stage: nothing under the name, and no folder that resolves."""
    dest = tmp_path / "out" / "model"
    monkeypatch.setattr(orbax.shutil, "rmtree", lambda *args, **kwargs: None)
    write = orbax._write_json

    def kill(path, value):
        if path.name == "config.json":
            raise KeyboardInterrupt
        write(path, value)

    monkeypatch.setattr(orbax, "_write_json", kill)
    with pytest.raises(KeyboardInterrupt):
        convert(source, dest, progress=False)
    assert not dest.exists()
    [partial] = dest.parent.iterdir()
    assert (partial / "params").is_dir()
    with pytest.raises(NotFoundError):
        resolve(partial)


def test_refusals(source, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(CheckpointError, match="taken exists; name a new folder"):
        convert(source, tmp_path / "taken")
    with pytest.raises(CheckpointError, match="'int4' is not one of float32, bfloat16, float16"):
        convert(source, tmp_path / "out", "int4")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_damaged_folder(source, tmp_path):
    dest = convert(source, tmp_path / "out", progress=False)
    checkpoint = resolve(dest)
    abstract = dict(stored_tensors(checkpoint))
    for file in (dest / "params").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:10])
    with pytest.raises(CorruptFileError, match=str(dest)):
        load_params(checkpoint, abstract, progress=False)
    (dest / "params" / "_METADATA").write_text(json.dumps({}))
    with pytest.raises(CorruptFileError, match="no readable Orbax checkpoint"):
        load_params(checkpoint, abstract, progress=False)
