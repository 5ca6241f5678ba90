"""Flags that `plan` and `simulate` share: the model and the machine."""

import argparse
from typing import TYPE_CHECKING, Any

from jaxllm.config import parse_bytes, parse_length
from jaxllm.errors import ConfigError
from jaxllm.planning.weights import DTYPE_BYTES, KV_DTYPE_BYTES, QUANTIZATIONS

if TYPE_CHECKING:
    from jaxllm.planning.plan import Plan


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "model", help="a well-known name (llama-3.1-8b), a folder, a .gguf file or a hub id"
    )
    parser.add_argument("--revision", help="revision of a hub id")
    machine = parser.add_argument_group("machine and model")
    machine.add_argument("--gpu", metavar="NAME", help="GPU model (H100, L4, ...), or cpu")
    machine.add_argument(
        "--memory", type=parse_bytes, metavar="SIZE", help="memory of another GPU: 80GiB, ..."
    )
    machine.add_argument(
        "--kv-cache-memory",
        type=parse_bytes,
        metavar="SIZE",
        help="size of the KV pool per device, instead of what is left",
    )
    machine.add_argument(
        "--dtype", choices=("auto", *DTYPE_BYTES), default="auto", help="of weights (default: auto)"
    )
    machine.add_argument(
        "--kv-cache-dtype",
        choices=("auto", *KV_DTYPE_BYTES),
        default="auto",
        help="of the KV cache (default: auto, that of the weights)",
    )
    machine.add_argument(
        "--quantization", choices=tuple(QUANTIZATIONS), help="of the layers' weights"
    )
    machine.add_argument(
        "--tensor-parallel-size", type=int, default=1, metavar="N", help="devices (default: 1)"
    )
    machine.add_argument(
        "--max-model-len",
        type=parse_length,
        metavar="LEN",
        help="most tokens of a request (default: the model's limit, or what fits)",
    )
    machine.add_argument("--block-size", type=int, metavar="N", help="tokens in a KV block")
    machine.add_argument(
        "--gpu-memory-utilization", type=float, metavar="X", help="share of the memory to use"
    )


def plan_from(arguments: argparse.Namespace, **settings: Any) -> "Plan":
    """The plan of parsed flags; `settings` are further ones of `plan`."""
    from jaxllm.planning.plan import plan

    return plan(
        arguments.model,
        revision=arguments.revision,
        gpu=arguments.gpu,
        memory=arguments.memory,
        kv_cache_memory=arguments.kv_cache_memory,
        dtype=arguments.dtype,
        kv_cache_dtype=arguments.kv_cache_dtype,
        quantization=arguments.quantization,
        tensor_parallel_size=arguments.tensor_parallel_size,
        max_model_len=tokens(arguments.max_model_len, "--max-model-len"),
        block_size=arguments.block_size,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        **settings,
    )


def tokens(value: int | str | None, flag: str) -> int | None:
    """A length that parse_length read; None where it is to be chosen."""
    if value == "auto":
        return None
    if value is None or isinstance(value, int):
        return value
    raise ConfigError(f"{flag} {value!r} is not a length")
