"""The GGUF container: metadata and tensor directory, checked before use. No JAX.

The header is read by `jaxllm.text.gguf_metadata`; behind it come the tensor directory and the
aligned data. Block sizes and dequantisation are the `gguf` package's.
"""

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jaxllm.checkpoints.errors import CorruptFileError, UnsupportedFormatError
from jaxllm.text.gguf_metadata import GgufReader

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
            if not file.read(1):
                raise CorruptFileError(f"{path} is not a GGUF file: it is empty")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.size = len(self._map)
        reader = GgufReader(path, self._map, CorruptFileError, UnsupportedFormatError)
        tensor_count, pair_count = reader.counts()
        self.metadata: dict[str, Any] = reader.pairs(pair_count)
        if self.metadata.get("split.count", 1) != 1:
            raise UnsupportedFormatError(
                f"{path} is one of {self.metadata['split.count']} parts; join them first "
                "(llama-gguf-split --merge)"
            )
        self.tensors = self._read_directory(reader, tensor_count)

    def _read_directory(self, reader: GgufReader, count: int) -> dict[str, GGUFTensor]:
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise CorruptFileError(f"{self.path} has general.alignment {alignment!r}")
        entries = [self._read_entry(reader) for _ in range(count)]
        data_start = -(-reader.offset // alignment) * alignment
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
        self, reader: GgufReader
    ) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = reader.string()
        dimensions = reader.scalar("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise CorruptFileError(f"{self.path}: tensor {name!r} has {dimensions} dimensions")
        # The file lists the contiguous dimension first.
        shape = tuple(reversed([reader.scalar("Q") for _ in range(dimensions)]))
        kind, offset = reader.scalar("I"), reader.scalar("Q")
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
