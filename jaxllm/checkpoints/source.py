"""What every file format offers the loader: names, shapes, and any slice of any tensor."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Index = tuple[tuple[int, int], ...]
"""One half-open (start, stop) range per dimension: a hashable slice without steps."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as stored. `dtype` is the file format's own name for its element type."""

    shape: tuple[int, ...]
    dtype: str


class TensorSource(Protocol):
    """An opened checkpoint. Reading is thread-safe."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor under its Hugging Face name, in the order they lie in the files."""

    def read(self, name: str, index: Index, dtype: np.dtype) -> np.ndarray:
        """The slice `index` of `name`, cast to `dtype`: a fresh C-contiguous array."""


def full_index(shape: tuple[int, ...]) -> Index:
    """The index that covers all of `shape`."""
    return tuple((0, size) for size in shape)
