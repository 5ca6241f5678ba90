import json
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from jaxllm.checkpoints.errors import (
    CheckpointError,
    CorruptFileError,
    NotFoundError,
    UnsupportedFormatError,
)
from jaxllm.checkpoints.safetensors import (
    DTYPES,
    MAX_HEADER_BYTES,
    SafetensorsFile,
    SafetensorsFolder,
)
from jaxllm.checkpoints.source import full_index

INDEX = "model.safetensors.index.json"


def encode(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_reads_what_the_library_wrote(tensors, write_folder):
    folder = write_folder(tensors)
    expected = load_file(folder / "model.safetensors")
    source = SafetensorsFolder(folder)
    assert set(source.tensors) == set(tensors)
    for name, info in source.tensors.items():
        value = source.read(name, full_index(info.shape), tensors[name].dtype)
        assert value.dtype == tensors[name].dtype
        np.testing.assert_array_equal(value, tensors[name])
        np.testing.assert_array_equal(value, expected[name])


@pytest.mark.parametrize("kind", sorted(DTYPES))
def test_every_element_type(kind, tmp_path):
    bits = np.arange(64, dtype=np.uint8) % 2 if kind == "BOOL" else np.arange(64, dtype=np.uint8)
    value = bits.view(DTYPES[kind])
    path = tmp_path / "a.safetensors"
    path.write_bytes(encode({"a": entry(kind, value.shape, (0, 64))}, bits.tobytes()))
    file = SafetensorsFile(path)
    read = file.read("a", full_index(value.shape), DTYPES[kind])
    assert read.tobytes() == bits.tobytes()
    if not kind.startswith("F8_E8M0"):
        cast = file.read("a", full_index(value.shape), np.dtype(np.float32))
        np.testing.assert_array_equal(cast, value.astype(np.float32))


def test_slices_are_cast_and_own_their_memory(tmp_path):
    value = np.arange(24, dtype=np.float32).reshape(4, 6)
    save_file({"a": value, "empty": np.zeros((0, 3), np.float32)}, tmp_path / "a.safetensors")
    file = SafetensorsFile(tmp_path / "a.safetensors")
    part = file.read("a", ((1, 3), (2, 5)), np.dtype(ml_dtypes.bfloat16))
    assert part.flags.owndata and part.flags.c_contiguous and part.flags.writeable
    np.testing.assert_array_equal(part.astype(np.float32), value[1:3, 2:5])
    assert file.read("empty", ((0, 0), (0, 3)), np.dtype(np.float32)).shape == (0, 3)


def test_sharded_folder(tensors, write_folder):
    source = SafetensorsFolder(write_folder(tensors, shards=3))
    assert set(source.tensors) == set(tensors)
    for name, value in tensors.items():
        np.testing.assert_array_equal(
            source.read(name, full_index(value.shape), value.dtype), value
        )


def test_files_without_an_index(tensors, write_folder, tmp_path):
    folder = write_folder(tensors, shards=2)
    (folder / INDEX).unlink()
    save_file({"other.name": tensors["model.norm.weight"]}, folder / "consolidated.safetensors")
    assert set(SafetensorsFolder(folder).tensors) == set(tensors)


BROKEN = {
    "empty file": (b"", "truncated"),
    "half a length": (b"\x10\0\0", "truncated"),
    "header past the end": (struct.pack("<Q", 1000) + b"{}", "truncated"),
    "giant header": (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "at most"),
    "largest length": (b"\xff" * 8 + b"{}", "at most"),
    "no JSON": (encode(b"hello"), "not JSON"),
    "no UTF-8": (encode(b'{"\xff": 1}'), "not JSON"),
    "a list": (encode(b"[]"), "not an object"),
    "deep nesting": (encode(b"[" * 200_000), "nested too deeply|not JSON"),
    "repeated name": (
        encode(b'{"a": %s, "a": %s}' % ((json.dumps(entry()).encode(),) * 2), bytes(8)),
        "'a' twice",
    ),
    "entry is no object": (encode({"a": 3}), "'a'"),
    "entry without shape": (encode({"a": {"dtype": "F32", "data_offsets": [0, 8]}}), "'a'"),
    "truncated data": (encode({"a": entry()}, bytes(7)), "truncated: tensor 'a'"),
    "unused data": (encode({"a": entry()}, bytes(9)), "1 bytes that no tensor uses"),
    "overlap": (
        encode({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
        "'b' overlaps 'a'",
    ),
    "hole": (encode({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20)), "'b' leaves a hole"),
    "negative offset": (encode({"a": entry(offsets=(-8, 0))}, bytes(8)), "'a' has data_offsets"),
    "backward offsets": (encode({"a": entry(offsets=(8, 0))}, bytes(8)), "'a' has data_offsets"),
    "offset too large": (encode({"a": entry(offsets=(2**63, 2**63 + 8))}), "'a' has data_offsets"),
    "negative size": (encode({"a": entry(shape=(-1, -2))}, bytes(8)), "'a' has shape"),
    "boolean size": (encode({"a": entry(shape=(True, 2))}, bytes(8)), "'a' has shape"),
    "size and offsets": (encode({"a": entry(shape=(3,))}, bytes(8)), "'a'.*needs 12 bytes"),
    "product beyond 64 bits": (encode({"a": entry(shape=(2**33, 2**33))}, bytes(8)), "'a'.*needs"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_file_names_file_and_tensor(case, tmp_path):
    content, message = BROKEN[case]
    path = tmp_path / "weights.safetensors"
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match=message) as error:
        SafetensorsFile(path)
    assert "weights.safetensors" in str(error.value)


def test_unknown_element_type(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(encode({"a": entry("F4", (16,))}, bytes(8)))
    with pytest.raises(UnsupportedFormatError, match=r"'a' has dtype 'F4'; known are BF16"):
        SafetensorsFile(path)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    cut=st.integers(0, 400),
    edits=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4),
)
def test_damage_is_a_typed_error_or_harmless(tmp_path, cut, edits):
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(4, np.float16)
    path = tmp_path / "fuzz.safetensors"
    save_file({"a": a, "b": b}, path)
    data = bytearray(path.read_bytes())
    for place, value in edits:
        data[place % len(data)] = value
    path.write_bytes(data[: max(0, len(data) - cut)] if cut % 3 == 0 else data)
    try:
        file = SafetensorsFile(path)
    except CheckpointError as error:
        assert "fuzz.safetensors" in str(error)
        return
    for name, info in file.tensors.items():
        assert file.read(name, full_index(info.shape), DTYPES[info.dtype]).shape == info.shape


@pytest.mark.parametrize("place", ["../x.safetensors", "/etc/x.safetensors", "a\\..\\b", "", 7])
def test_index_may_not_leave_the_folder(place, tensors, write_folder):
    folder = write_folder(tensors, shards=2)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": place}}))
    with pytest.raises(CorruptFileError, match="'a' lies outside the folder"):
        SafetensorsFolder(folder)


def test_index_and_files_disagree(tensors, write_folder):
    folder = write_folder(tensors, shards=2)
    index = json.loads((folder / INDEX).read_text())
    file = index["weight_map"]["model.norm.weight"]

    index["weight_map"]["ghost"] = file
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CorruptFileError, match=r"'ghost'.*lacks it"):
        SafetensorsFolder(folder)

    del index["weight_map"]["ghost"]
    index["weight_map"]["model.norm.weight"] = "model-9.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(NotFoundError, match=r"model-9.safetensors"):
        SafetensorsFolder(folder)


def test_tensor_in_two_files(tensors, write_folder):
    folder = write_folder(tensors, shards=2)
    (folder / INDEX).unlink()
    name = "model.norm.weight"
    save_file({name: tensors[name]}, folder / "again.safetensors")
    with pytest.raises(CorruptFileError, match=f"'{name}' lies in both"):
        SafetensorsFolder(folder)
