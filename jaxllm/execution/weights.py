"""Weights from a trainer: named, checked, and placed where the programs expect them."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxllm.errors import WeightsError
from jaxllm.execution.parameters import Params

type Abstract = Mapping[str, jax.ShapeDtypeStruct]

TIED_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
FLOATS = ("float64", "float32", "bfloat16", "float16")


def named_leaves(weights: Any) -> dict[str, Any]:
    """Arrays by checkpoint name, of a Flax NNX module or state, or of nested mappings and
    sequences: keys on the way to a leaf are joined by dots."""
    if isinstance(weights, nnx.Module):
        weights = nnx.state(weights, nnx.Param)
    if not isinstance(weights, Mapping):
        raise WeightsError([f"a {type(weights).__name__} has no named leaves"])
    return dict(_walk("", weights))


def _walk(prefix: str, node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, nnx.Variable):
        yield prefix, node.get_value()
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield from _walk(f"{prefix}.{key}" if prefix else str(key), value)
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield from _walk(f"{prefix}.{index}", value)
    else:
        yield prefix, node


def check_weights(leaves: Mapping[str, Any], abstract: Abstract) -> dict[str, Any]:
    """The leaves that `abstract` asks for, in its order, if they fit.

    The head of a model with tied embeddings may be given beside them if it equals the embedding.

    Raises:
      WeightsError: leaves are missing, surplus, no arrays, of another shape, no floats, deleted, or
        out of this process's reach. Every problem is named, with what is expected.
    """
    problems = []
    for name in leaves:
        if name not in abstract and not (name == TIED_HEAD and TIED_HEAD not in abstract):
            problems.append(f"{name}: the model has no such weight")
    for name, expected in abstract.items():
        if name not in leaves:
            problems.append(f"{name}: missing, expected {_shape(expected)}")
        elif problem := _problem(leaves[name], expected):
            problems.append(f"{name}: {problem}")
    if not problems and TIED_HEAD in leaves and TIED_HEAD not in abstract:
        head, embedding = leaves[TIED_HEAD], leaves[EMBEDDING]
        if head is not embedding and not np.array_equal(np.asarray(head), np.asarray(embedding)):
            problems.append(f"{TIED_HEAD}: differs from {EMBEDDING}, to which this model ties it")
    if problems:
        raise WeightsError(problems)
    return {name: leaves[name] for name in abstract}


def _shape(leaf: Any) -> str:
    return f"{jnp.dtype(leaf.dtype).name}{list(leaf.shape)}"


def _problem(leaf: Any, expected: jax.ShapeDtypeStruct) -> str | None:
    """Why this leaf cannot be used, or None."""
    if isinstance(leaf, jax.core.Tracer):
        return "a traced value; update weights outside of jit and grad"
    if not isinstance(leaf, (jax.Array, np.ndarray)):
        return f"a {type(leaf).__name__}, expected an array {_shape(expected)}"
    if leaf.shape != expected.shape:
        return f"{_shape(leaf)}, expected {_shape(expected)}"
    if jnp.dtype(leaf.dtype).name not in FLOATS:
        return f"{_shape(leaf)}, expected {_shape(expected)} or another of {', '.join(FLOATS)}"
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            return "its buffer is gone: it was donated to a program, or deleted"
        if not leaf.is_fully_addressable:
            return f"sharded as {leaf.sharding}, partly on devices of other processes"
    return None


def place_weights(leaves: Mapping[str, Any], abstract: Abstract, copy: bool) -> Params:
    """Checked leaves with the dtypes and shardings of `abstract`, complete on return.

    Args:
      copy: never share memory with the given arrays; without it those that fit already are taken
        as they are.
    """
    placed = {name: _place(leaves[name], abstract[name], copy) for name in abstract}
    return jax.block_until_ready(placed)


def _place(leaf: jax.Array | np.ndarray, expected: jax.ShapeDtypeStruct, copy: bool) -> jax.Array:
    if leaf.dtype != expected.dtype:
        # A cast makes fresh memory. Host arrays are cast on the host, which compiles nothing.
        return jax.device_put(leaf.astype(expected.dtype), expected.sharding)
    if isinstance(leaf, np.ndarray):
        # A device whose memory is the host's may take a numpy array's memory as its own.
        return jax.device_put(np.array(leaf, order="C") if copy else leaf, expected.sharding)
    return jax.device_put(leaf, expected.sharding, may_alias=False if copy else None)


def to_host(params: Params) -> dict[str, np.ndarray]:
    """Copies in host memory, leaf by leaf; each leaf is taken out of `params` as it is copied."""
    return {name: np.array(params.pop(name)) for name in list(params)}
