"""Safetensors files, one or many, read through a memory map.

The format (https://github.com/huggingface/safetensors): 8 bytes little-endian header length, a
JSON header `{name: {dtype, shape, data_offsets}}`, then the raw data, without holes. The header is
checked here in full before a byte of data is used, and a slice is copied straight from the map:
numpy has no bfloat16 or float8 of its own, so the types come from ml_dtypes.
"""

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import ml_dtypes
import numpy as np

from jaxllm.checkpoints.errors import (
    CorruptFileError,
    NotFoundError,
    UnsupportedFormatError,
)
from jaxllm.checkpoints.json_file import MAX_INDEX_BYTES, parse_json_object, read_json_object
from jaxllm.checkpoints.source import Index, TensorInfo

MAX_HEADER_BYTES = 100_000_000
INDEX_NAME = "model.safetensors.index.json"

DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True, slots=True)
class _Entry:
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int


class SafetensorsFile:
    """One file, mapped. `tensors` keeps the order of the data in the file.

    Raises:
        CorruptFileError: truncated, or a header that breaks the format; names file and tensor.
        UnsupportedFormatError: an element type numpy and ml_dtypes do not have.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            header, self._data_start = _read_header(path, file.read(8), file, size)
            entries = _check_entries(path, header, size - self._data_start)
            # An empty data part cannot be mapped, and has nothing to read.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._entries = entries
        self.tensors = {name: TensorInfo(e.shape, e.dtype) for name, e in entries.items()}

    def read(self, name: str, index: Index, dtype: np.dtype) -> np.ndarray:
        """The slice `index` of `name`, cast to `dtype`: a fresh C-contiguous array."""
        entry = self._entries[name]
        stored: np.ndarray = np.ndarray(
            entry.shape, DTYPES[entry.dtype], self._map, self._data_start + entry.start
        )
        part = stored[tuple(slice(start, stop) for start, stop in index)]
        return np.array(part, dtype=dtype, order="C", copy=True)


class SafetensorsFolder:
    """All weights of a Hugging Face folder: sharded with an index, one file, or several.

    Raises:
        NotFoundError: no weights, or a file which the index names is not there.
        CorruptFileError: as SafetensorsFile; also an index that leaves the folder, names a tensor
            its file lacks, or a tensor that lies in two files.
    """

    def __init__(self, folder: Path) -> None:
        index_path = folder / INDEX_NAME
        weight_map = _read_index(index_path) if index_path.is_file() else None
        names = list(dict.fromkeys(weight_map.values())) if weight_map else _weight_files(folder)
        files = {name: _open(folder, name) for name in names}
        self._file_of: dict[str, SafetensorsFile] = {}
        for file in files.values():
            for name in file.tensors:
                if name in self._file_of:
                    raise CorruptFileError(
                        f"tensor {name!r} lies in both {self._file_of[name].path} and {file.path}"
                    )
                self._file_of[name] = file
        for name, file_name in (weight_map or {}).items():
            if name not in files[file_name].tensors:
                raise CorruptFileError(
                    f"{index_path} says that {name!r} is in {file_name}, which lacks it"
                )
        self.tensors = {name: file.tensors[name] for name, file in self._file_of.items()}

    def read(self, name: str, index: Index, dtype: np.dtype) -> np.ndarray:
        """The slice `index` of `name`, cast to `dtype`: a fresh C-contiguous array."""
        return self._file_of[name].read(name, index, dtype)


def _read_header(path: Path, prefix: bytes, file: Any, size: int) -> tuple[dict[str, Any], int]:
    if len(prefix) < 8:
        raise CorruptFileError(f"{path} is truncated: {size} bytes, no header length")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise CorruptFileError(
            f"{path} claims a header of {length} bytes; at most {MAX_HEADER_BYTES} are read"
        )
    if 8 + length > size:
        raise CorruptFileError(f"{path} is truncated: {size} bytes, header of {length}")
    return parse_json_object(file.read(length), f"the header of {path}"), 8 + length


def _check_entries(path: Path, header: dict[str, Any], data_bytes: int) -> dict[str, _Entry]:
    entries = {
        name: _check_entry(path, name, value)
        for name, value in header.items()
        if name != "__metadata__"
    }
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    position, previous = 0, "the start"
    for name, entry in ordered.items():
        if entry.start != position:
            kind = "overlaps" if entry.start < position else "leaves a hole after"
            raise CorruptFileError(f"{path}: tensor {name!r} {kind} {previous!r}")
        if entry.stop > data_bytes:
            raise CorruptFileError(
                f"{path} is truncated: tensor {name!r} ends at byte {entry.stop} "
                f"of the data, which has {data_bytes}"
            )
        position, previous = entry.stop, name
    if position != data_bytes:
        raise CorruptFileError(f"{path} has {data_bytes - position} bytes that no tensor uses")
    return ordered


def _check_entry(path: Path, name: str, value: Any) -> _Entry:
    where = f"{path}: tensor {name!r}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CorruptFileError(f"{where} does not give dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UnsupportedFormatError(
            f"{where} has dtype {dtype!r}; known are {', '.join(sorted(DTYPES))}"
        )
    if not _is_sizes(shape):
        raise CorruptFileError(f"{where} has shape {shape!r}")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CorruptFileError(f"{where} has data_offsets {offsets!r}")
    need = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != need:
        raise CorruptFileError(
            f"{where} of shape {tuple(shape)} and dtype {dtype} needs {need} bytes "
            f"but has {offsets[1] - offsets[0]}"
        )
    return _Entry(tuple(shape), dtype, offsets[0], offsets[1])


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 62 for v in value)


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json_object(path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptFileError(f"{path} has no weight_map")
    for name, file in weight_map.items():
        # Links are followed (the Hub's cache is made of them); names that climb out are not.
        parts = PurePosixPath(file).parts if isinstance(file, str) else ()
        if not parts or file.startswith("/") or ".." in parts or "\\" in file or "\0" in file:
            raise CorruptFileError(f"{path}: tensor {name!r} lies outside the folder: {file!r}")
    return weight_map


def _weight_files(folder: Path) -> list[str]:
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    # The "consolidated" files of some repositories repeat the weights under other names.
    names = sorted(
        path.name
        for path in folder.glob("*.safetensors")
        if not path.name.startswith(("consolidated", "adapter_"))
    )
    if not names:
        raise NotFoundError(f"no *.safetensors file in {folder}")
    return names


def _open(folder: Path, name: str) -> SafetensorsFile:
    path = folder / name
    if not path.is_file():
        raise NotFoundError(f"{folder / INDEX_NAME} names {name!r}, which is not in the folder")
    return SafetensorsFile(path)
