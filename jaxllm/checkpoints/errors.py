"""What can be wrong with a checkpoint. Every error names the file, the tensor or the value."""

from collections.abc import Sequence


class CheckpointError(ValueError):
    """A checkpoint that cannot be found, understood or used."""


class NotFoundError(CheckpointError):
    """Nothing usable at the given place: no such folder, no weights in it, no such package."""


class HubError(CheckpointError):
    """The Hugging Face Hub could not give the repository: offline, gated, or no such name."""


class UnsafeFormatError(CheckpointError):
    """Weights in a format that runs code when it is read (pickle), which is never opened."""


class UnsupportedFormatError(CheckpointError):
    """A well-formed file with something this library does not read: it is named, with what is."""


class CorruptFileError(CheckpointError):
    """A file that breaks its own format: truncated, overlapping tensors, a bad header."""


class TensorMismatchError(CheckpointError):
    """The tensors of a checkpoint are not those the model needs.

    Attributes:
        missing: expected names which the checkpoint lacks.
        surplus: names in the checkpoint which the model has no place for.
        wrong_shape: one `name: found (..), expected (..)` line per tensor of another shape.
    """

    def __init__(
        self,
        checkpoint: str,
        *,
        missing: Sequence[str] = (),
        surplus: Sequence[str] = (),
        wrong_shape: Sequence[str] = (),
    ) -> None:
        self.missing = tuple(missing)
        self.surplus = tuple(surplus)
        self.wrong_shape = tuple(wrong_shape)
        parts = [
            _listing("missing", self.missing),
            _listing("not part of the model", self.surplus),
            _listing("of the wrong shape", self.wrong_shape),
        ]
        super().__init__(
            f"the tensors of {checkpoint} are not those of the model: "
            + "; ".join(part for part in parts if part)
        )


def _listing(what: str, names: Sequence[str], limit: int = 10) -> str:
    if not names:
        return ""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{len(names)} {what}: {', '.join(names[:limit])}{more}"
