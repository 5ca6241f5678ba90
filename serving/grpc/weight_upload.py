"""Weights that a client streams, on their way into a file that the engine process reads.

The file is safetensors. Its header comes first and is known last, so room for it is kept: its
length depends on the model alone, but for the dtypes, which are padded.
"""

import json
import math
from pathlib import Path
from typing import Any, BinaryIO

from serving.errors import ControlError

# Name in messages -> name in the file, bytes.
DTYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}
_LENGTH_BYTES = 8


class WeightUpload:
    """Takes the chunks of one upload, every tensor of the model once, whole.

    Args:
      expected: (name, shape) of every weight. Nothing beyond them is accepted, so that an upload is
        never larger than the model in float32.
    """

    def __init__(self, folder: Path, expected: list[tuple[str, tuple[int, ...]]]):
        self._missing = dict(expected)
        self._entries: dict[str, dict[str, Any]] = {}
        self._file: BinaryIO = open(folder / "model.safetensors", "wb")  # noqa: SIM115 - close()
        most = 4 * sum(math.prod(shape) for _, shape in expected)
        widest = {name: _entry("BF16", shape, most, most) for name, shape in expected}
        self._header_bytes = len(json.dumps(widest))
        self._file.seek(_LENGTH_BYTES + self._header_bytes)
        self._written = 0
        self._name = ""
        self._left = 0

    def add(self, chunk: Any) -> None:
        """Writes a TensorChunk.

        Raises:
          ControlError: it does not fit what came before it, or the model; or the disk is full.
        """
        if chunk.name:
            self._begin(chunk.name, chunk.dtype, tuple(chunk.shape))
        if len(chunk.data) > self._left:
            raise ControlError(
                f"{self._name or 'the first chunk'}: {len(chunk.data)} bytes, but {self._left} "
                "are left of this tensor",
                "argument",
            )
        try:
            self._file.write(chunk.data)
        except OSError as error:
            raise ControlError(f"the weights could not be stored: {error}", "engine") from None
        self._left -= len(chunk.data)
        self._written += len(chunk.data)

    def finish(self) -> None:
        """Completes the file; ControlError if tensors or bytes are missing."""
        self._check_whole()
        if self._missing:
            names = list(self._missing)
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ControlError(f"weights are missing: {', '.join(names[:5])}{more}", "argument")
        header = json.dumps(self._entries).encode()
        self._file.seek(0)
        self._file.write(self._header_bytes.to_bytes(_LENGTH_BYTES, "little"))
        self._file.write(header.ljust(self._header_bytes))
        self._file.close()

    def close(self) -> None:
        self._file.close()

    def _begin(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        self._check_whole()
        expected = self._missing.pop(name, None)
        if expected is None:
            what = "came before" if name in self._entries else "is no weight of this model"
            raise ControlError(f"{name} {what}", "argument")
        if shape != expected:
            raise ControlError(f"{name}: {list(shape)}, expected {list(expected)}", "argument")
        if dtype not in DTYPES:
            raise ControlError(f"{name}: dtype {dtype!r}, one of {', '.join(DTYPES)}", "argument")
        stored, size = DTYPES[dtype]
        self._name, self._left = name, math.prod(shape) * size
        self._entries[name] = _entry(stored, shape, self._written, self._written + self._left)

    def _check_whole(self) -> None:
        if self._left:
            raise ControlError(f"{self._name}: {self._left} bytes are missing", "argument")


def _entry(dtype: str, shape: tuple[int, ...], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
