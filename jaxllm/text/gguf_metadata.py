"""The header of a GGUF file: version, counts, and the key-value metadata.

The layout is that of the GGUF specification
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), versions 2 and 3, little-endian: magic
`GGUF`, u32 version, u64 tensor count, u64 pair count, then the pairs: a string key, a u32 type and
a value. A string is a u64 length and UTF-8 bytes; an array is a u32 element type, a u64 length and
the elements. The reader of the `gguf` package takes seconds to walk a vocabulary because it makes a
numpy array per string; this one reads the same bytes with `struct`.

Every length is checked against the bytes that are left before anything is read or allocated, so a
truncated or hostile file ends in an error and never in a large allocation.
"""

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.text.errors import TokenizerError

VERSIONS = (2, 3)

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


def read_gguf_metadata(path: Path, prefix: str = "") -> dict[str, Any]:
    """The metadata pairs of the GGUF file at `path` whose key starts with `prefix`.

    Pairs with another key are walked over, not decoded. Raises `TokenizerError` for a file that is
    not GGUF, of another version or byte order, truncated, or malformed.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = GgufReader(path, data, TokenizerError, TokenizerError)
            _, count = reader.counts()
            return reader.pairs(count, prefix)
    except (OSError, ValueError) as error:
        if isinstance(error, TokenizerError):
            raise
        raise TokenizerError(f"{path}: cannot be read as GGUF: {error}") from error


class GgufReader:
    """Reads the values of a header one after another and refuses to run past the end.

    Args:
      path: for messages.
      data: the file, mapped.
      corrupt: raised for bytes that break the format.
      unsupported: raised for a version that is not in VERSIONS.

    Attributes:
      offset: bytes read so far.
    """

    __slots__ = ("_corrupt", "_data", "_path", "_unsupported", "offset")

    def __init__(
        self,
        path: Path,
        data: mmap.mmap,
        corrupt: type[Exception],
        unsupported: type[Exception],
    ) -> None:
        self._path, self._data, self.offset = path, data, 0
        self._corrupt, self._unsupported = corrupt, unsupported

    def counts(self) -> tuple[int, int]:
        """(tensors, pairs), read after magic and version."""
        if self._data[self._take(min(4, len(self._data))) : self.offset] != b"GGUF":
            raise self._corrupt(f"{self._path} is not a GGUF file: it does not begin with 'GGUF'")
        version = self.scalar("I")
        if version not in VERSIONS:
            raise self._unsupported(
                f"{self._path} is GGUF version {version}; read are {VERSIONS}, little-endian"
            )
        return self.scalar("Q"), self.scalar("Q")

    def pairs(self, count: int, prefix: str = "") -> dict[str, Any]:
        """The next `count` pairs, but only those whose key starts with `prefix`."""
        result: dict[str, Any] = {}
        for _ in range(count):
            key = self.string()
            kind = self.scalar("I")
            if not key.startswith(prefix):
                self._skip(kind)
                continue
            if key in result:
                raise self._corrupt(f"{self._path} gives the metadata key {key!r} twice")
            result[key] = self._value(kind)
        return result

    def scalar(self, code: str) -> Any:
        """A number by its `struct` code."""
        return struct.unpack_from("<" + code, self._data, self._take(struct.calcsize(code)))[0]

    def string(self) -> str:
        """Text after its length."""
        length = self.scalar("Q")
        start = self._take(length)
        try:
            return self._data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._corrupt(f"{self._path}: the string at byte {start} is not UTF-8") from error

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        item, count = self._array(kind, depth)
        if item in _SCALARS:
            code = _SCALARS[item]
            start = self._take(count * struct.calcsize(code))
            return list(struct.unpack_from(f"<{count}{code}", self._data, start))
        return [self._value(item, depth + 1) for _ in range(count)]

    def _skip(self, kind: int, depth: int = 0) -> None:
        """Walks over a value of this kind."""
        if kind == _STRING:
            self._take(self.scalar("Q"))
        elif kind in _SCALARS:
            self._take(struct.calcsize(_SCALARS[kind]))
        else:
            item, count = self._array(kind, depth)
            if item in _SCALARS:
                self._take(count * struct.calcsize(_SCALARS[item]))
                return
            for _ in range(count):
                self._skip(item, depth + 1)

    def _array(self, kind: int, depth: int) -> tuple[int, int]:
        """(element type, length) of an array whose elements fit the file."""
        if kind != _ARRAY or depth >= _MAX_ARRAY_DEPTH:
            raise self._corrupt(
                f"{self._path}: unknown value type {kind} at byte {self.offset}; known are "
                f"{sorted([*_SCALARS, _STRING, _ARRAY])}"
            )
        item, count = self.scalar("I"), self.scalar("Q")
        # Every string or array takes at least eight bytes, so a false count ends early.
        if item not in _SCALARS and count * 8 > len(self._data) - self.offset:
            raise self._corrupt(f"{self._path} is truncated: an array of {count} values")
        return item, count

    def _take(self, count: int) -> int:
        start = self.offset
        if count > len(self._data) - start:
            raise self._corrupt(
                f"{self._path} is truncated: {count} bytes wanted at byte {start} "
                f"of {len(self._data)}"
            )
        self.offset = start + count
        return start
