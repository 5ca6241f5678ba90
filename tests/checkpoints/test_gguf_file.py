import struct

import ml_dtypes
import numpy as np
import pytest
from gguf import GGUFReader
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxllm.checkpoints.errors import CheckpointError, CorruptFileError, UnsupportedFormatError
from jaxllm.checkpoints.gguf_file import QUANTIZATIONS, GGUFFile
from tests.checkpoints.gguf_files import layer_tensors, random_blocks, write_gguf

F32 = np.dtype(np.float32)
NAME = "blk.0.ffn_up.weight"


def string(text):
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def pair(key, kind, value):
    return string(key) + struct.pack("<I", kind) + value


def container(pairs=(), directory=(), data=b"", version=3):
    head = b"GGUF" + struct.pack("<IQQ", version, len(directory), len(pairs))
    body = head + b"".join(pairs) + b"".join(directory)
    return body + bytes(-len(body) % 32) + data


def tensor(name, dims, kind=0, offset=0):
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def test_metadata_of_every_type(tmp_path):
    values = {
        0: ("B", 200),
        1: ("b", -3),
        2: ("H", 60000),
        3: ("h", -7),
        4: ("I", 1 << 31),
        5: ("i", -(1 << 30)),
        6: ("f", 0.5),
        7: ("?", True),
        10: ("Q", 1 << 63),
        11: ("q", -(1 << 62)),
        12: ("d", 0.1),
    }
    pairs = [pair(f"k{kind}", kind, struct.pack("<" + c, v)) for kind, (c, v) in values.items()]
    pairs.append(pair("text", 8, string("ünï")))
    pairs.append(pair("words", 9, struct.pack("<IQ", 8, 2) + string("a") + string("")))
    pairs.append(pair("floats", 9, struct.pack("<IQ3f", 6, 3, 1.0, 2.0, -1.5)))
    nested = struct.pack("<IQ", 9, 1) + struct.pack("<IQ2b", 1, 2, 1, -1)
    pairs.append(pair("nested", 9, nested))
    path = tmp_path / "a.gguf"
    path.write_bytes(container(pairs))
    metadata = GGUFFile(path).metadata
    assert {key: metadata[key] for key in metadata if key[1:].isdigit()} == {
        f"k{kind}": value for kind, (_, value) in values.items()
    }
    assert metadata["text"] == "ünï"
    assert metadata["words"] == ["a", ""]
    assert metadata["floats"] == [1.0, 2.0, -1.5]
    assert metadata["nested"] == [[1, -1]]


@pytest.mark.parametrize("kind", QUANTIZATIONS.values(), ids=lambda kind: kind.name)
def test_every_quantisation_in_parts(kind, tmp_path):
    """Any rows and columns give the same bits as dequantising the whole tensor."""
    blocks = random_blocks(kind, 300, 1024, seed=int(kind))
    path = write_gguf(tmp_path / "a.gguf", tensors={NAME: blocks}, kinds={NAME: kind})
    file = GGUFFile(path)
    whole = dequantize(blocks, kind)
    assert file.tensors[NAME].shape == whole.shape == (300, 1024)
    np.testing.assert_array_equal(file.read(NAME, slice(None), (0, 1024), F32), whole)
    part = file.read(NAME, slice(17, 290), (100, 901), F32)
    np.testing.assert_array_equal(part, whole[17:290, 100:901])
    rows = np.array([5, 2, 2, 299])
    np.testing.assert_array_equal(file.read(NAME, rows, (0, 33), F32), whole[rows, :33])
    narrow = file.read(NAME, slice(0, 3), (256, 512), np.dtype(ml_dtypes.bfloat16))
    assert narrow.flags.c_contiguous and narrow.flags.owndata
    np.testing.assert_array_equal(narrow, whole[:3, 256:512].astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [("F16", 2e-3), ("BF16", 2e-2), ("Q8_0", 0.03), ("Q5_1", 0.15), ("Q4_0", 0.5)],
)
def test_values_survive_quantisation(kind, tolerance, tmp_path):
    value = layer_tensors()[NAME]
    kind = GGMLQuantizationType[kind]
    path = write_gguf(tmp_path / "a.gguf", tensors={NAME: value}, kinds={NAME: kind})
    read = GGUFFile(path).read(NAME, slice(None), (0, value.shape[1]), F32)
    np.testing.assert_allclose(read, value, atol=tolerance)


def test_agrees_with_the_reader_of_the_package(tmp_path):
    kinds = {NAME: GGMLQuantizationType.Q5_0, "token_embd.weight": GGMLQuantizationType.F16}
    path = write_gguf(tmp_path / "a.gguf", sizes={"attention.head_count_kv": [2, 2]}, kinds=kinds)
    file, reader = GGUFFile(path), GGUFReader(path)
    theirs = {key: field.contents() for key, field in reader.fields.items()}
    assert file.metadata == {k: v for k, v in theirs.items() if not k.startswith("GGUF.")}
    assert list(file.tensors) == [found.name for found in reader.tensors]
    for found in reader.tensors:
        value = dequantize(found.data, found.tensor_type)
        ours = file.tensors[found.name]
        assert (ours.kind, ours.shape) == (found.tensor_type, value.shape)
        read = file.read(found.name, slice(None), (0, value.shape[-1]), F32)
        np.testing.assert_array_equal(read.reshape(value.shape), value)


VALID = pair("general.architecture", 8, string("llama"))
BROKEN = {
    "other magic": (b"GGML" + bytes(40), "not a GGUF file"),
    "only magic": (b"GGUF", "truncated"),
    "counts past the end": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60), "truncated"),
    "string past the end": (
        container([struct.pack("<Q", 1 << 62) + b"abc"]),
        "truncated",
    ),
    "array past the end": (
        container([pair("a", 9, struct.pack("<IQ", 4, 1 << 61))]),
        "truncated",
    ),
    "strings past the end": (
        container([pair("a", 9, struct.pack("<IQ", 8, 1 << 61))]),
        "truncated: an array",
    ),
    "unknown type": (container([pair("a", 13, bytes(8))]), "unknown value type 13"),
    "endless nesting": (
        container([pair("a", 9, struct.pack("<IQ", 9, 1) * 100)]),
        "unknown value type 9",
    ),
    "repeated key": (container([VALID, VALID]), "'general.architecture' twice"),
    "text is not UTF-8": (container([pair("a", 8, string(b"\xff\xfe"))]), "not UTF-8"),
    "alignment": (
        container([pair("general.alignment", 4, struct.pack("<I", 24))]),
        "general.alignment 24",
    ),
    "no dimensions": (container([], [tensor("t", ())]), "'t' has 0 dimensions"),
    "many dimensions": (container([], [tensor("t", (1,) * 9)]), "'t' has 9 dimensions"),
    "repeated tensor": (
        container([], [tensor("t", (8,)), tensor("t", (8,), offset=32)], bytes(64)),
        "'t' twice",
    ),
    "unaligned": (container([], [tensor("t", (8,), offset=8)], bytes(64)), "'t' is not aligned"),
    "data missing": (container([], [tensor("t", (8, 4))], bytes(127)), "truncated: tensor 't'"),
    "size beyond 64 bits": (
        container([], [tensor("t", (1 << 40, 1 << 40))], bytes(64)),
        "truncated: tensor 't'",
    ),
    "overlap": (
        container([], [tensor("t", (16,)), tensor("u", (8,), offset=32)], bytes(64)),
        "'u' overlaps 't'",
    ),
    "half a block": (container([], [tensor("t", (33,), kind=8)], bytes(64)), "'t' has rows of 33"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_file_names_the_place(case, tmp_path):
    content, message = BROKEN[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match=message) as error:
        GGUFFile(path)
    assert "model.gguf" in str(error.value)


@pytest.mark.parametrize("version", [1, 4, 0x03000000])
def test_other_versions_are_refused(version, tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(container(version=version))
    with pytest.raises(UnsupportedFormatError, match=f"version {version}; read are"):
        GGUFFile(path)


@pytest.mark.parametrize(("kind", "name"), [(23, "IQ4_XS"), (39, "MXFP4"), (999, "number 999")])
def test_other_quantisations_are_refused_by_name(kind, name, tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(container([], [tensor("blk.0.x", (256,), kind=kind)], bytes(1024)))
    with pytest.raises(UnsupportedFormatError, match=rf"'blk.0.x' is quantised as {name}; .*Q6_K"):
        GGUFFile(path)


def test_split_files_are_refused(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(container([pair("split.count", 2, struct.pack("<H", 3))]))
    with pytest.raises(UnsupportedFormatError, match="one of 3 parts"):
        GGUFFile(path)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    path = write_gguf(folder / "a.gguf", tensors={NAME: np.ones((2, 32), np.float32)})
    return path.read_bytes()


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    keep=st.floats(0, 1),
    edits=st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), max_size=4),
)
def test_damage_is_a_typed_error_or_harmless(small_file, tmp_path, keep, edits):
    data = bytearray(small_file)
    for place, value in edits:
        data[place % len(data)] = value
    if not edits:
        data = data[: int(keep * len(data))]
    path = tmp_path / "fuzz.gguf"
    path.write_bytes(data)
    try:
        file = GGUFFile(path)
    except CheckpointError as error:
        assert "fuzz.gguf" in str(error)
        return
    for found in file.tensors.values():
        file.read(found.name, slice(None), (0, found.shape[-1]), F32)
