"""Orbax folders: weights stored so that each device reads its own part.

A folder written by `convert` holds the parameters as an Orbax checkpoint (OCDBT) in `params/`,
config.json, generation_config.json and the tokenizer files, and ORBAX_MARKER, written last.
"""

import json
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxllm.checkpoints.errors import CheckpointError, CorruptFileError
from jaxllm.checkpoints.gguf_file import GGUFFile
from jaxllm.checkpoints.load import (
    Abstract,
    Params,
    always_ignored,
    check_tensors,
    is_ignored,
    load_params,
    open_source,
)
from jaxllm.checkpoints.resolve import ORBAX_MARKER, Checkpoint, resolve
from jaxllm.checkpoints.safetensors import DTYPES

CONVERT_DTYPES = ("float32", "bfloat16", "float16")

_PARAMS = "params"
# A restored slice reads whole chunks, so a chunk is small beside a device's share of a matrix.
_CHUNK_BYTES = 32 << 20
_TOKENIZER_FILES = (
    "tokenizer*",
    "*.model",
    "*.jinja",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.json",
)


def restore(checkpoint: Checkpoint, abstract: Abstract, ignore: Collection[str]) -> Params:
    """Reads the parameters of a converted folder; each device reads its part.

    Args:
        checkpoint: an Orbax checkpoint.
        abstract: shape, target dtype and sharding (None: the default device) by name.
        ignore: shell-style patterns of stored names that `abstract` need not have.

    Raises:
        TensorMismatchError: tensors are missing, surplus, or of another shape.
        CorruptFileError: Orbax cannot read the folder.
    """
    stored = stored_tensors(checkpoint)
    shapes = {name: leaf.shape for name, leaf in stored.items()}
    check_tensors(checkpoint.name, shapes, abstract, ignore)
    wanted = dict(abstract)
    args = ocp.args.PyTreeRestore(
        item=wanted,
        restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
        partial_restore=len(wanted) < len(stored),
    )
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            found = checkpointer.restore(_params_path(checkpoint), args=args)
    except (OSError, ValueError, KeyError) as error:
        raise CorruptFileError(f"{checkpoint.path} cannot be restored: {error}") from error
    # Without a sharding Orbax gives numpy arrays in the stored type.
    return {
        name: jax.device_put(np.asarray(found[name]).astype(leaf.dtype))
        if leaf.sharding is None
        else found[name]
        for name, leaf in abstract.items()
    }


def stored_tensors(checkpoint: Checkpoint) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every parameter of an Orbax checkpoint, by name.

    Raises:
        CorruptFileError: Orbax cannot read the folder's metadata.
    """
    path = _params_path(checkpoint)
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            tree = checkpointer.metadata(path).item_metadata.tree
        return {
            name: jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype) for name, leaf in tree.items()
        }
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CorruptFileError(f"{path} is no readable Orbax checkpoint: {error}") from error


def convert(
    source: str | Path,
    dest: Path,
    dtype: str | None = None,
    *,
    revision: str | None = None,
    offline: bool | None = None,
    progress: bool = True,
) -> Path:
    """Writes a model as one Orbax folder that `resolve` understands.

    All parameters pass through host memory at once. The folder is built beside `dest` and renamed
    when it is complete: an interrupted conversion leaves nothing that resolves.

    Args:
        source: anything `resolve` takes.
        dest: the folder to write; it must not exist, or be empty.
        dtype: one of CONVERT_DTYPES for the floating-point parameters; None keeps the stored type,
            and bfloat16 for quantised GGUF files.
        revision, offline, progress: as in `resolve`.

    Returns:
        `dest`.

    Raises:
        CheckpointError: `dest` is taken, `dtype` is unknown, or as `resolve` and `load_params`.
    """
    if dtype not in (None, *CONVERT_DTYPES):
        raise CheckpointError(f"dtype {dtype!r} is not one of {', '.join(CONVERT_DTYPES)}")
    dest = Path(dest).absolute()
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise CheckpointError(f"{dest} exists; name a new folder")
    checkpoint = resolve(source, revision=revision, offline=offline, progress=progress)
    abstract = _abstract(checkpoint, dtype)
    partial = dest.parent / f".{dest.name}.partial-{os.getpid()}"
    partial.mkdir(parents=True)
    try:
        params = load_params(checkpoint, abstract, progress=progress)
        _save(partial / _PARAMS, params)
        _write_tokenizer(checkpoint, partial)
        _write_json(partial / "generation_config.json", checkpoint.generation_config)
        _write_json(partial / "config.json", _config(checkpoint, dtype))
        _write_json(partial / ORBAX_MARKER, {"format": "orbax", "version": 1, "params": _PARAMS})
        partial.replace(dest)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return dest


def _params_path(checkpoint: Checkpoint) -> Path:
    return (checkpoint.path / _PARAMS).absolute()


def _abstract(checkpoint: Checkpoint, dtype: str | None) -> dict[str, jax.ShapeDtypeStruct]:
    """What to store: every tensor of the checkpoint that a model can use, on one CPU device."""
    host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])

    def leaf(shape: tuple[int, ...], stored: np.dtype) -> jax.ShapeDtypeStruct:
        floating = jax.dtypes.issubdtype(stored, np.floating)
        target = dtype if dtype and floating else jax.dtypes.canonicalize_dtype(stored)
        return jax.ShapeDtypeStruct(shape, jax.numpy.dtype(target), sharding=host)

    if checkpoint.format == "orbax":
        stored = stored_tensors(checkpoint)
        return {name: leaf(value.shape, value.dtype) for name, value in stored.items()}
    bfloat16 = DTYPES["BF16"]
    ignored = always_ignored(checkpoint, ())
    return {
        name: leaf(info.shape, DTYPES.get(info.dtype, bfloat16))
        for name, info in open_source(checkpoint).tensors.items()
        if not is_ignored(name, ignored)
    }


def _save(path: Path, params: Params) -> None:
    save_args = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in params}
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(params, save_args=save_args))


def _config(checkpoint: Checkpoint, dtype: str | None) -> dict[str, Any]:
    if dtype is None:
        return checkpoint.config
    key = "dtype" if "dtype" in checkpoint.config else "torch_dtype"
    return checkpoint.config | {key: dtype}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_tokenizer(checkpoint: Checkpoint, dest: Path) -> None:
    if checkpoint.format == "gguf":
        _write_gguf_tokenizer(checkpoint, dest)
        return
    for pattern in _TOKENIZER_FILES:
        for file in checkpoint.path.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, dest / file.name)


def _write_gguf_tokenizer(checkpoint: Checkpoint, dest: Path) -> None:
    if "tokenizer.ggml.model" not in GGUFFile(checkpoint.path).metadata:
        return
    from jaxllm.text.gguf_tokenizer import load_gguf_tokenizer

    found = load_gguf_tokenizer(checkpoint.path)
    found.backend.save(str(dest / "tokenizer.json"))
    names = {"bos_token": found.bos_token_id, "eos_token": found.eos_token_id}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": checkpoint.config["max_position_embeddings"],
        "chat_template": found.chat_template,
    } | {name: found.backend.id_to_token(i) for name, i in names.items() if i is not None}
    given = {key: value for key, value in settings.items() if value is not None}
    _write_json(dest / "tokenizer_config.json", given)
