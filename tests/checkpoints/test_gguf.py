import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.checkpoints.errors import CorruptFileError, UnsupportedFormatError
from jaxllm.checkpoints.gguf import GGUFSource, hugging_face_name
from jaxllm.checkpoints.load import load_params
from jaxllm.checkpoints.resolve import resolve
from jaxllm.checkpoints.source import full_index
from tests.checkpoints.gguf_files import layer_tensors, write_gguf

F32 = np.dtype(np.float32)
Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"


def read_all(source, name):
    return source.read(name, full_index(source.tensors[name].shape), F32)


def rotate_pairs(x, angle):
    """llama.cpp's rotation: dimensions 2i and 2i + 1 of a head turn together. x: [H, D]."""
    even, odd = x[:, 0::2], x[:, 1::2]
    out = np.empty_like(x)
    out[:, 0::2] = even * np.cos(angle) - odd * np.sin(angle)
    out[:, 1::2] = even * np.sin(angle) + odd * np.cos(angle)
    return out


def rotate_halves(x, angle):
    """Hugging Face's rotation: dimensions i and i + D/2 turn together. x: [H, D]."""
    first, second = np.split(x, 2, axis=1)
    return np.concatenate(
        [
            first * np.cos(angle) - second * np.sin(angle),
            first * np.sin(angle) + second * np.cos(angle),
        ],
        axis=1,
    )


def test_llama_rows_give_the_same_attention_scores(tmp_path):
    """q.k with pairwise rotation of the file's rows == with half-split rotation of ours."""
    stored = layer_tensors()
    source = GGUFSource(write_gguf(tmp_path / "a.gguf"))
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal((2, 64))
    frequencies = 500000.0 ** -(np.arange(8) / 8)

    def scores(q_weight, k_weight, rotate):
        q = rotate((q_weight @ x).reshape(4, 16), 11 * frequencies)
        k = rotate((k_weight @ y).reshape(2, 16), 5 * frequencies)
        return np.einsum("hd,hd->h", q, np.repeat(k, 2, axis=0))

    theirs = scores(stored["blk.0.attn_q.weight"], stored["blk.0.attn_k.weight"], rotate_pairs)
    ours = scores(read_all(source, Q), read_all(source, K), rotate_halves)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert not np.allclose(ours, scores(*(read_all(source, n) for n in (Q, K)), rotate_pairs))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_everything_but_llama_queries_and_keys_keeps_its_order(arch, tmp_path):
    stored = layer_tensors(arch)
    source = GGUFSource(write_gguf(tmp_path / "a.gguf", arch))
    assert set(source.tensors) == {hugging_face_name(name) for name in stored}
    for gguf_name, value in stored.items():
        name = hugging_face_name(gguf_name)
        same = np.array_equal(read_all(source, name), value)
        assert same == (arch != "llama" or name not in (Q, K))
        assert source.tensors[name].shape == value.shape


@pytest.mark.parametrize("index", [((0, 64), (0, 64)), ((5, 37), (0, 64)), ((16, 32), (31, 50))])
def test_slices_of_permuted_rows(index, tmp_path):
    source = GGUFSource(
        write_gguf(tmp_path / "a.gguf", kinds={"blk.0.attn_q.weight": GGMLQuantizationType.Q8_0})
    )
    whole = read_all(source, Q)
    np.testing.assert_array_equal(
        source.read(Q, index, F32), whole[tuple(slice(*part) for part in index)]
    )


def test_llama_biases_are_permuted_like_their_rows(tmp_path):
    tensors = layer_tensors()
    tensors["blk.0.attn_q.bias"] = tensors["blk.0.attn_q.weight"][:, 0].copy()
    source = GGUFSource(write_gguf(tmp_path / "a.gguf", tensors=tensors))
    bias = "model.layers.0.self_attn.q_proj.bias"
    np.testing.assert_array_equal(read_all(source, bias), read_all(source, Q)[:, 0])
    np.testing.assert_array_equal(
        source.read(bias, ((20, 40),), F32), read_all(source, Q)[20:40, 0]
    )


def test_sharded_load_of_a_quantised_file(tmp_path, mesh):
    kinds = {
        name: GGMLQuantizationType.Q4_1
        for name, value in layer_tensors().items()
        if value.ndim == 2
    }
    checkpoint = resolve(write_gguf(tmp_path / "a.gguf", kinds=kinds))
    source = GGUFSource(checkpoint.path)

    def abstract(sharding_of):
        return {
            name: jax.ShapeDtypeStruct(info.shape, jnp.float32, sharding=sharding_of(name, info))
            for name, info in source.tensors.items()
        }

    def split(name, info):
        if len(info.shape) == 1:
            return NamedSharding(mesh(4), PartitionSpec("tensor"))
        columns = "o_proj" in name or "down_proj" in name
        spec = PartitionSpec(None, "tensor") if columns else PartitionSpec("tensor")
        return NamedSharding(mesh(4), spec)

    whole = load_params(checkpoint, abstract(lambda *_: None), progress=False)
    parts = load_params(checkpoint, abstract(split), progress=False)
    for name, value in whole.items():
        np.testing.assert_array_equal(np.asarray(parts[name]), np.asarray(value))
        assert len(parts[name].addressable_shards) == 4


def test_unknown_architecture(tmp_path):
    with pytest.raises(UnsupportedFormatError, match=r"'gemma'; known are llama, qwen2, qwen3"):
        GGUFSource(write_gguf(tmp_path / "a.gguf", "gemma"))


def test_rows_that_are_no_whole_heads(tmp_path):
    tensors = layer_tensors()
    tensors["blk.0.attn_q.weight"] = np.zeros((60, 64), np.float32)
    source = GGUFSource(write_gguf(tmp_path / "a.gguf", tensors=tensors))
    with pytest.raises(CorruptFileError, match="60 rows for 4 heads"):
        read_all(source, Q)


def test_stacked_tensors_are_refused(tmp_path):
    tensors = layer_tensors() | {"blk.0.ffn_up_exps.weight": np.zeros((2, 4, 32), np.float32)}
    source = GGUFSource(write_gguf(tmp_path / "a.gguf", tensors=tensors))
    with pytest.raises(UnsupportedFormatError, match=r"ffn_up_exps.*3 dimensions"):
        read_all(source, "blk.0.ffn_up_exps.weight")
