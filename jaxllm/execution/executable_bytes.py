"""Compiled programs as bytes and back, without tracing and without pickle.

XLA gives the bytes of the machine code. The rest of an executable (which arguments it uses, what it
returns) is JSON; shardings come from the `Program` that the executable belongs to. The parts of JAX
that make a `Compiled` of these are not public; all use of them is in this module. They are the same
from jax 0.11.2 to 0.12.0.

Machine code is not checked by anything: bytes must come from a place that only the user writes to.
"""

import hashlib
import json
from typing import Any

import jax
from jax._src import core, stages
from jax._src.interpreters import pxla
from jax._src.layout import Layout
from jax._src.lib import xla_client

from jaxllm.execution.program import Program

_MAGIC = b"jaxllm program 1\n"
_DIGEST_BYTES = 32
_LENGTH_BYTES = 4
# Fields of JAX's executable that decide how it is called and what its results are.
_FIELDS = (
    "in_avals",
    "out_avals",
    "_in_shardings",
    "_out_shardings",
    "_kept_var_idx",
    "_xla_in_layouts",
    "_dispatch_in_layouts",
    "_xla_out_layouts",
)


class ExecutableError(ValueError):
    """The bytes are not those of a program, or the program cannot be given as bytes."""


def to_bytes(program: Program, compiled: jax.stages.Compiled) -> bytes:
    """The bytes of what compiling `program` gave.

    It must come from the compiler. XLA gives bytes of a CPU executable that it had read from bytes,
    JAX's cache included, too, but functions are missing in them (0.11.2 and 0.12.0).

    Raises:
      ExecutableError: it holds more than code: constants, effects or callbacks, or results in
        another structure than lists and tuples.
    """
    executable: Any = compiled._executable
    parts = executable._unloaded_executable
    more = (
        compiled._params.const_args,
        parts.unordered_effects,
        parts.ordered_effects,
        parts.host_callbacks,
        parts.keepalive,
        parts.mut,
    )
    if any(more) or not parts.committed:
        raise ExecutableError(f"{parts.name} is more than code and shapes")
    outputs = jax.tree.unflatten(compiled.out_tree, executable.out_avals)
    header = json.dumps(
        {
            "name": parts.name,
            "kept": sorted(executable._kept_var_idx),
            "outputs": _describe(outputs),
        }
    ).encode()
    rebuilt = _assemble(program, json.loads(header), executable.xla_executable)
    other: Any = rebuilt._executable
    if (rebuilt.in_tree, rebuilt.out_tree) != (compiled.in_tree, compiled.out_tree):
        raise ExecutableError(f"{parts.name} has arguments or results of another structure")
    for field in _FIELDS:
        if _as_tuple(getattr(other, field)) != _as_tuple(getattr(executable, field)):
            raise ExecutableError(f"{parts.name}: {field} does not follow from its definition")
    code = executable.xla_executable.serialize()
    body = len(header).to_bytes(_LENGTH_BYTES, "little") + header + code
    return _MAGIC + hashlib.sha256(body).digest() + body


def from_bytes(program: Program, data: bytes) -> jax.stages.Compiled:
    """The executable that `to_bytes` was given, for the devices of the program's shardings.

    Raises:
      ExecutableError: the bytes are damaged. What else JAX raises says that they are of another
        version of it.
    """
    start = len(_MAGIC) + _DIGEST_BYTES
    body = memoryview(data)[start:]
    if not data.startswith(_MAGIC):
        raise ExecutableError("no program, or one of another format")
    if hashlib.sha256(body).digest() != data[len(_MAGIC) : start]:
        raise ExecutableError("damaged")
    end = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little")
    header = json.loads(bytes(body[_LENGTH_BYTES:end]))
    devices = _devices(program)
    code = devices[0].client.deserialize_executable(
        bytes(body[end:]), executable_devices=xla_client.DeviceList(devices)
    )
    return _assemble(program, header, code)


def kept_arguments(lowered: jax.stages.Lowered) -> list[int]:
    """Positions of the flat arguments that the program uses; its text has only those."""
    computation: Any = lowered._lowering
    return sorted(computation.compile_args["kept_var_idx"])


def _assemble(program: Program, header: dict[str, Any], code: Any) -> jax.stages.Compiled:
    """What compiling `program` gives, of loaded code."""
    flat, in_tree = jax.tree.flatten((program.arguments, {}))
    avals = [core.shaped_abstractify(argument) for argument in flat]
    kept = header["kept"]
    in_avals = [avals[i] for i in kept]
    in_shardings = [flat[i].sharding for i in kept]
    outputs = _undescribe(header["outputs"])
    out_structs, out_tree = jax.tree.flatten(outputs)
    out_shardings = jax.tree.leaves(jax.tree.broadcast(program.out_shardings, outputs))
    out_avals = [
        core.shaped_abstractify(
            jax.ShapeDtypeStruct(out.shape, out.dtype, sharding=sharding, weak_type=out.weak_type)
        )
        for out, sharding in zip(out_structs, out_shardings, strict=True)
    ]
    devices = _devices(program)
    in_layouts = [Layout.from_pjrt_layout(layout) for layout in code.get_parameter_layouts()]
    executable = pxla.UnloadedMeshExecutable(
        xla_executable=code,
        device_list=xla_client.DeviceList(devices),
        backend=devices[0].client,
        input_avals=in_avals,
        input_shardings=in_shardings,
        output_avals=out_avals,
        output_shardings=out_shardings,
        committed=True,
        name=header["name"],
        unordered_effects=[],
        ordered_effects=[],
        keepalive=[],
        host_callbacks=[],
        kept_var_idx=set(kept),
        mut=None,
        xla_in_layouts=in_layouts,
        dispatch_in_layouts=pxla.get_dispatch_layouts(in_layouts, in_shardings, in_avals),
        xla_out_layouts=[Layout.from_pjrt_layout(x) for x in code.get_output_layouts()],
        all_args_info=None,
        pgle_profiler=None,
    ).load()
    donated = [
        i in program.donated
        for i, tree in enumerate(program.arguments)
        for _ in jax.tree.leaves(tree)
    ]
    infos = [stages.ArgInfo(aval, gone) for aval, gone in zip(avals, donated, strict=True)]
    return jax.stages.Compiled(executable, [], jax.tree.unflatten(in_tree, infos), out_tree)


def _devices(program: Program) -> tuple[jax.Device, ...]:
    sharding = jax.tree.leaves(program.arguments)[0].sharding
    return tuple(sharding.mesh.devices.flat)


def _describe(outputs: Any) -> Any:
    """A tree of lists, tuples and abstract values as JSON."""
    if isinstance(outputs, list | tuple):
        return {type(outputs).__name__: [_describe(output) for output in outputs]}
    if not isinstance(outputs, core.ShapedArray):
        raise ExecutableError(f"a result of type {type(outputs).__name__}")
    return [outputs.dtype.name, list(outputs.shape), outputs.weak_type]


def _undescribe(described: Any) -> Any:
    if isinstance(described, dict):
        [(kind, outputs)] = described.items()
        return {"list": list, "tuple": tuple}[kind](_undescribe(output) for output in outputs)
    dtype, shape, weak_type = described
    return jax.ShapeDtypeStruct(tuple(shape), jax.numpy.dtype(dtype), weak_type=weak_type)


def _as_tuple(values: Any) -> tuple[Any, ...]:
    return tuple(sorted(values)) if isinstance(values, set) else tuple(values)
