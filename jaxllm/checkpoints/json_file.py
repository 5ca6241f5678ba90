"""Bounded, strict reading of the JSON files that come with weights."""

import json
from pathlib import Path
from typing import Any

from jaxllm.checkpoints.errors import CorruptFileError, NotFoundError

MAX_CONFIG_BYTES = 16 << 20
MAX_INDEX_BYTES = 64 << 20


def read_json_object(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        NotFoundError: there is no such file.
        CorruptFileError: it is larger than `max_bytes`, not JSON, not an object, or repeats a key.
    """
    if not path.is_file():
        raise NotFoundError(f"no file {path}")
    size = path.stat().st_size
    if size > max_bytes:
        raise CorruptFileError(f"{path} has {size} bytes; at most {max_bytes} are read")
    return parse_json_object(path.read_bytes(), str(path))


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `data`; `where` names its place in errors (CorruptFileError)."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise CorruptFileError(f"{where} gives {key!r} twice")
            result[key] = value
        return result

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except CorruptFileError:
        raise
    except RecursionError as error:
        raise CorruptFileError(f"{where} is nested too deeply") from error
    except ValueError as error:
        raise CorruptFileError(f"{where} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CorruptFileError(f"{where} holds a JSON {type(value).__name__}, not an object")
    return value
