"""From a checkpoint to sharded parameters, one shard of one tensor at a time."""

import math
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase

import jax
import numpy as np
from tqdm import tqdm

from jaxllm.checkpoints.dummy import random_params
from jaxllm.checkpoints.errors import CheckpointError, TensorMismatchError, UnsupportedFormatError
from jaxllm.checkpoints.gguf import GGUFSource
from jaxllm.checkpoints.resolve import Checkpoint
from jaxllm.checkpoints.safetensors import SafetensorsFolder
from jaxllm.checkpoints.source import Index, TensorSource, full_index

Params = dict[str, jax.Array]
Abstract = Mapping[str, jax.ShapeDtypeStruct]

# Buffers which old exporters saved although they follow from the configuration.
_ALWAYS_IGNORED = ("*.rotary_emb.inv_freq",)
_READERS = 2


def load_params(
    checkpoint: Checkpoint,
    abstract: Abstract,
    *,
    ignore: Collection[str] = (),
    seed: int = 0,
    progress: bool = True,
) -> Params:
    """Reads the parameters of a model onto their devices.

    Every distinct slice that a sharding asks for is read once, cast on the host and sent to all
    devices which hold it; at most two slices are on the host at a time.

    Args:
        checkpoint: what `resolve` found.
        abstract: shape, target dtype and sharding (None: the default device, uncommitted) of every
            parameter, by Hugging Face name.
        ignore: shell-style patterns (`*.inv_freq`) of names that may be in the checkpoint without
            being in `abstract`. The head of a model with tied embeddings is always ignored.
        seed: of the random weights, where `checkpoint.format` is "dummy".
        progress: show a bar, in bytes.

    Returns:
        The parameters by name, in the order of `abstract`.

    Raises:
        TensorMismatchError: tensors are missing, surplus, or of another shape.
        CheckpointError: a file is corrupt or of an unsupported kind.
    """
    if checkpoint.format == "dummy":
        return random_params(abstract, seed)
    ignored = (*ignore, *always_ignored(checkpoint, abstract))
    if checkpoint.format == "orbax":
        # Orbax takes seconds to import, and most starts do without.
        from jaxllm.checkpoints.orbax import restore

        return restore(checkpoint, abstract, ignored)
    source = open_source(checkpoint)
    shapes = {name: info.shape for name, info in source.tensors.items()}
    check_tensors(checkpoint.name, shapes, abstract, ignored)
    return read_params(source, abstract, progress=progress)


def open_source(checkpoint: Checkpoint) -> TensorSource:
    """The stored tensors of a safetensors or GGUF checkpoint.

    Raises:
        CheckpointError: another format, or a file that is corrupt.
        UnsupportedFormatError: safetensors whose configuration names a quantisation.
    """
    if checkpoint.format == "safetensors":
        if quantisation := checkpoint.config.get("quantization_config"):
            method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
            raise UnsupportedFormatError(
                f"{checkpoint.name} is quantised with {method!r}; quantised weights are read "
                "from GGUF files only"
            )
        return SafetensorsFolder(checkpoint.path)
    if checkpoint.format == "gguf":
        return GGUFSource(checkpoint.path)
    raise CheckpointError(f"{checkpoint.name} is {checkpoint.format}: it has no tensor files")


def check_tensors(
    name: str,
    found: Mapping[str, tuple[int, ...]],
    abstract: Abstract,
    ignore: Collection[str],
) -> None:
    """Raises TensorMismatchError unless `found` (shape by name) is what `abstract` expects."""
    missing = [key for key in abstract if key not in found]
    surplus = [key for key in found if key not in abstract and not is_ignored(key, ignore)]
    wrong = [
        f"{key}: found {found[key]}, expected {tuple(leaf.shape)}"
        for key, leaf in abstract.items()
        if key in found and found[key] != tuple(leaf.shape)
    ]
    if missing or surplus or wrong:
        raise TensorMismatchError(name, missing=missing, surplus=surplus, wrong_shape=wrong)


def always_ignored(checkpoint: Checkpoint, expected: Collection[str]) -> tuple[str, ...]:
    """Patterns of names which any model may leave out; `expected` are the model's own names."""
    tied = checkpoint.config.get("tie_word_embeddings") and "lm_head.weight" not in expected
    return (*_ALWAYS_IGNORED, "lm_head.weight") if tied else _ALWAYS_IGNORED


def is_ignored(name: str, patterns: Collection[str]) -> bool:
    """Whether a shell-style pattern matches the whole name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def read_params(source: TensorSource, abstract: Abstract, *, progress: bool = False) -> Params:
    """Reads every parameter of `abstract` from `source`, whose shapes must be the same."""
    shards = {name: _shards(leaf) for name, leaf in abstract.items()}
    sizes = {
        name: sum(_elements(index) for index in by_index) * np.dtype(abstract[name].dtype).itemsize
        for name, by_index in shards.items()
    }
    order = [name for name in source.tensors if name in abstract]
    bar = tqdm(
        total=sum(sizes.values()),
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        desc="Loading weights",
        disable=not progress,
    )
    pool = ThreadPoolExecutor(_READERS, thread_name_prefix="weights")
    params: Params = {}
    try:
        futures = [
            pool.submit(_read_param, source, name, abstract[name], shards[name]) for name in order
        ]
        for name, future in zip(order, futures, strict=True):
            params[name] = future.result()
            bar.update(sizes[name])
    finally:
        # After an error or Ctrl-C the tensors still queued are not read.
        pool.shutdown(cancel_futures=True)
        bar.close()
    return {name: params[name] for name in abstract}


def _read_param(
    source: TensorSource,
    name: str,
    leaf: jax.ShapeDtypeStruct,
    shards: Mapping[Index, Sequence[jax.Device]],
) -> jax.Array:
    dtype = np.dtype(leaf.dtype)
    if leaf.sharding is None:
        [index] = shards
        return jax.device_put(source.read(name, index, dtype)).block_until_ready()
    pieces: list[jax.Array] = []
    # jax.make_array_from_callback would hold all shards on the host at once, and read a slice
    # again for every device that holds it.
    for index, devices in shards.items():
        pieces += _send(source.read(name, index, dtype), devices)
    return jax.make_array_from_single_device_arrays(tuple(leaf.shape), leaf.sharding, pieces)


def _send(part: np.ndarray, devices: Sequence[jax.Device]) -> list[jax.Array]:
    """A copy on each device, complete on return: the caller's buffer can go."""
    return jax.block_until_ready([jax.device_put(part, device) for device in devices])


def _shards(leaf: jax.ShapeDtypeStruct) -> dict[Index, list[jax.Device]]:
    """The distinct slices this process needs, each with the devices that hold it."""
    shape = tuple(leaf.shape)
    if leaf.sharding is None:
        return {full_index(shape): []}
    result: dict[Index, list[jax.Device]] = {}
    for device, slices in leaf.sharding.addressable_devices_indices_map(shape).items():
        index = tuple(
            part.indices(size)[:2] for part, size in zip(slices or (), shape, strict=True)
        )
        result.setdefault(index, []).append(device)
    return result


def _elements(index: Index) -> int:
    return math.prod(stop - start for start, stop in index)
