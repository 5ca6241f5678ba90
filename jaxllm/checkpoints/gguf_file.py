"""The GGUF container: metadata and tensor directory, checked before use. No JAX.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), version 2 and 3, little
endian: magic, version, tensor count, metadata count, typed key-value pairs, the tensor directory,
then the aligned data. The `gguf` package's reader takes seconds to walk a vocabulary because it
makes a numpy array per string; this one reads the same bytes with `struct`. Block sizes and
dequantisation are the package's.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jaxllm.checkpoints.errors import CorruptFileError, UnsupportedFormatError

VERSIONS = (2, 3)
QUANTIZATIONS: Mapping[int, GGMLQuantizationType] = {
    int(kind): kind
    for kind in (
        GGMLQuantizationType.F32,
        GGMLQuantizationType.F16,
        GGMLQuantizationType.BF16,
        GGMLQuantizationType.Q4_0,
        GGMLQuantizationType.Q4_1,
        GGMLQuantizationType.Q5_0,
        GGMLQuantizationType.Q5_1,
        GGMLQuantizationType.Q8_0,
        GGMLQuantizationType.Q2_K,
        GGMLQuantizationType.Q3_K,
        GGMLQuantizationType.Q4_K,
        GGMLQuantizationType.Q5_K,
        GGMLQuantizationType.Q6_K,
    )
}

_SCALARS: Mapping[int, str] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_MAX_ARRAY_DEPTH = 4
_MAX_DIMENSIONS = 4
_CHUNK_ELEMENTS = 1 << 18


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor of the directory. `shape` is in numpy order: rows first, a row contiguous."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    row_bytes: int


class GGUFFile:
    """A mapped GGUF file.

    Attributes:
        metadata: every key with its Python value (str, int, float, bool or a list of them).
        tensors: the tensor directory by GGUF name, in file order.

    Raises:
        CorruptFileError: not GGUF, truncated, or inconsistent; the place is named.
        UnsupportedFormatError: another version, a quantisation outside QUANTIZATIONS, or one part
            of a split file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise CorruptFileError(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.size = len(self._map)
        cursor = _Cursor(path, self._map)
        cursor.offset = 4
        version = cursor.scalar("I")
        if version not in VERSIONS:
            raise UnsupportedFormatError(f"{path} is GGUF version {version}; read are {VERSIONS}")
        tensor_count, pair_count = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = cursor.string()
            if key in self.metadata:
                raise CorruptFileError(f"{path} gives the metadata key {key!r} twice")
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        if self.metadata.get("split.count", 1) != 1:
            raise UnsupportedFormatError(
                f"{path} is one of {self.metadata['split.count']} parts; join them first "
                "(llama-gguf-split --merge)"
            )
        self.tensors = self._read_directory(cursor, tensor_count)

    def _read_directory(self, cursor: "_Cursor", count: int) -> dict[str, GGUFTensor]:
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise CorruptFileError(f"{self.path} has general.alignment {alignment!r}")
        entries = [self._read_entry(cursor) for _ in range(count)]
        data_start = -(-cursor.offset // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        spans: list[tuple[int, int, str]] = []
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise CorruptFileError(f"{self.path} has the tensor {name!r} twice")
            if offset % alignment:
                raise CorruptFileError(f"{self.path}: tensor {name!r} is not aligned: {offset}")
            row_bytes = _row_bytes(self.path, name, shape, kind)
            start = data_start + offset
            stop = start + math.prod(shape[:-1]) * row_bytes
            if stop > self.size:
                raise CorruptFileError(
                    f"{self.path} is truncated: tensor {name!r} ends at byte {stop} of {self.size}"
                )
            tensors[name] = GGUFTensor(name, shape, kind, start, row_bytes)
            spans.append((start, stop, name))
        spans.sort()
        for (_, stop, name), (start, _, other) in pairwise(spans):
            if start < stop:
                raise CorruptFileError(f"{self.path}: tensor {other!r} overlaps {name!r}")
        return tensors

    def _read_entry(
        self, cursor: "_Cursor"
    ) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = cursor.string()
        dimensions = cursor.scalar("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise CorruptFileError(f"{self.path}: tensor {name!r} has {dimensions} dimensions")
        # The file lists the contiguous dimension first.
        shape = tuple(reversed([cursor.scalar("Q") for _ in range(dimensions)]))
        kind, offset = cursor.scalar("I"), cursor.scalar("Q")
        if kind not in QUANTIZATIONS:
            try:
                found = GGMLQuantizationType(kind).name
            except ValueError:
                found = f"number {kind}"
            raise UnsupportedFormatError(
                f"{self.path}: tensor {name!r} is quantised as {found}; "
                f"read are {', '.join(known.name for known in QUANTIZATIONS.values())}"
            )
        return name, shape, QUANTIZATIONS[kind], offset

    def read(
        self,
        name: str,
        rows: np.ndarray | slice,
        columns: tuple[int, int],
        dtype: np.dtype,
    ) -> np.ndarray:
        """Dequantises part of a tensor, a MiB at a time.

        Args:
            name: GGUF name of a tensor of shape [rows, columns]; a vector counts as one row.
            rows: which rows, and in which order: int indices [N] or a slice without a step.
            columns: half-open range within each row; only its blocks are dequantised.
            dtype: element type of the result.

        Returns:
            [N, columns[1] - columns[0]], fresh and C-contiguous.
        """
        tensor = self.tensors[name]
        count = math.prod(tensor.shape[:-1])
        block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        first, last = columns[0] // block, -(-columns[1] // block)
        stored: np.ndarray = np.ndarray(
            (count, tensor.row_bytes), np.uint8, self._map, tensor.offset
        )[:, first * block_bytes : last * block_bytes]
        picked = np.arange(count)[rows]
        out = np.empty((len(picked), columns[1] - columns[0]), dtype)
        skip = columns[0] - first * block
        step = max(1, _CHUNK_ELEMENTS // max(1, (last - first) * block))
        for start in range(0, len(picked), step):
            chunk = stored[picked[start : start + step]]
            # As one long row: the package walks the rows of a matrix sixteen at a time in Python.
            values = dequantize(chunk.reshape(1, -1), tensor.kind).reshape(len(chunk), -1)
            out[start : start + step] = values[:, skip : skip + out.shape[1]]
        return out


def _row_bytes(path: Path, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise CorruptFileError(
            f"{path}: tensor {name!r} has rows of {shape[-1]}, no multiple of the "
            f"{block} values in a block of {kind.name}"
        )
    return shape[-1] // block * block_bytes


class _Cursor:
    """Reads values one after another and refuses to run past the end."""

    __slots__ = ("_data", "_path", "offset")

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self.offset = path, data, 0

    def take(self, count: int) -> int:
        start = self.offset
        if count > len(self._data) - start:
            raise CorruptFileError(
                f"{self._path} is truncated: {count} bytes wanted at byte {start} "
                f"of {len(self._data)}"
            )
        self.offset = start + count
        return start

    def scalar(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self._data, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        length = self.scalar("Q")
        start = self.take(length)
        try:
            return self._data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorruptFileError(
                f"{self._path}: the string at byte {start} is not UTF-8"
            ) from error

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _ARRAY and depth < _MAX_ARRAY_DEPTH:
            item, count = self.scalar("I"), self.scalar("Q")
            if item in _SCALARS:
                code = _SCALARS[item]
                start = self.take(count * struct.calcsize(code))
                return list(struct.unpack_from(f"<{count}{code}", self._data, start))
            # Every string or array takes at least eight bytes, so a false count ends early.
            if count * 8 > len(self._data) - self.offset:
                raise CorruptFileError(f"{self._path} is truncated: an array of {count} values")
            return [self.value(item, depth + 1) for _ in range(count)]
        raise CorruptFileError(f"{self._path}: unknown value type {kind} at byte {self.offset}")
