"""Key-value metadata of a GGUF file, read without touching its tensors.

The layout is that of the GGUF specification, versions 2 and 3, little-endian: magic `GGUF`, u32
version, u64 tensor count, u64 pair count, then the pairs: a string key, a u32 type and a value. A
string is a u64 length and UTF-8 bytes; an array is a u32 element type, a u64 length and the
elements.

Every length is checked against the bytes that are left before anything is read or allocated, so a
truncated or hostile file ends in an error and never in a large allocation.
"""

import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.text.errors import TokenizerError

Scalar = str | int | float | bool
Value = Scalar | list[Scalar]

_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


def read_gguf_metadata(path: Path, prefix: str = "") -> dict[str, Value]:
    """The metadata pairs of the GGUF file at `path` whose key starts with `prefix`.

    Pairs with another key are walked over, not decoded. Raises `TokenizerError` for a file that is
    not GGUF, of another version or byte order, truncated, or malformed.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).pairs(prefix)
    except (OSError, ValueError) as error:
        if isinstance(error, TokenizerError):
            raise
        raise TokenizerError(f"{path}: cannot be read as GGUF: {error}") from error


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap):
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 0

    def pairs(self, prefix: str) -> dict[str, Value]:
        if self._take(4) != b"GGUF":
            raise self._error("the magic GGUF is missing")
        version = self._u32()
        if version not in (2, 3):
            raise self._error(
                f"GGUF version {version} is not supported (2 and 3 are, little-endian)"
            )
        self._u64()  # tensor count
        result: dict[str, Value] = {}
        for _ in range(self._u64()):
            key = self._string()
            kind = self._u32()
            wanted = key.startswith(prefix)
            value = self._array(wanted) if kind == _ARRAY else self._scalar(kind)
            if wanted and value is not None:
                if key in result:
                    raise self._error(f"key {key!r} appears twice")
                result[key] = value
        return result

    def _array(self, wanted: bool) -> list[Scalar] | None:
        kind = self._u32()
        count = self._u64()
        if kind == _STRING:
            if count > (self._size - self._at) // _U64.size:
                raise self._error(f"an array of {count} strings is longer than the file")
            if wanted:
                return [self._string() for _ in range(count)]
            for _ in range(count):
                self._skip(self._u64())
            return None
        dtype = self._number(kind)
        start = self._at
        self._skip(count * dtype.itemsize)
        if not wanted:
            return None
        return np.frombuffer(self._data[start : self._at], dtype).tolist()

    def _scalar(self, kind: int) -> Scalar:
        if kind == _STRING:
            return self._string()
        dtype = self._number(kind)
        return np.frombuffer(self._take(dtype.itemsize), dtype)[0].item()

    def _number(self, kind: int) -> np.dtype[Any]:
        if kind not in _NUMBERS:
            raise self._error(f"value type {kind} is not one of {sorted(_NUMBERS)} or {_STRING}")
        return _NUMBERS[kind]

    def _string(self) -> str:
        raw = self._take(self._u64())
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._error(f"string {raw[:40]!r} is not UTF-8") from error

    def _u32(self) -> int:
        return _U32.unpack(self._take(4))[0]

    def _u64(self) -> int:
        return _U64.unpack(self._take(8))[0]

    def _take(self, count: int) -> bytes:
        start = self._at
        self._skip(count)
        return self._data[start : self._at]

    def _skip(self, count: int) -> None:
        if count > self._size - self._at:
            raise self._error(
                f"truncated: {count} bytes wanted at offset {self._at}, the file has {self._size}"
            )
        self._at += count

    def _error(self, what: str) -> TokenizerError:
        return TokenizerError(f"{self._path}: {what}")
