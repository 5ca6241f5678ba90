"""Memory a step needs beside weights and KV pool: compiled where that is possible, else a bound."""

import dataclasses
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from jaxllm.planning.gpus import Gpu
from jaxllm.planning.weights import DTYPE_BYTES

if TYPE_CHECKING:
    from jaxllm.models.config import ModelConfig

logger = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 600.0
# Scratch space of matrix products, whatever their size.
WORKSPACE_BYTES = 32 * 2**20
# Of a row, and what one takes packed and unpacked.
EDIT_ENTRIES = 1024
EDIT_ENTRY_BYTES = 32
_CUDA_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")


@dataclasses.dataclass(frozen=True, slots=True)
class StepShape:
    """What decides the memory of a step.

    Attributes:
      dtype, kv_dtype: names of numpy dtypes.
      all_logprobs: whether requests may ask for log probabilities of the whole vocabulary.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    dtype: str
    kv_dtype: str
    tp: int
    all_logprobs: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Activation:
    """Arrays and temporaries of the largest step on one device, in bytes.

    Attributes:
      source: where the number comes from, for the reader of a plan.
      compiled: whether a compiler gave it; a formula's is an upper bound.
    """

    num_bytes: int
    source: str
    compiled: bool


def activation_bound(config: "ModelConfig", shape: StepShape) -> Activation:
    """An upper bound by formula.

    The larger of the MLP's live set (input, residual and normed hidden states, one of them in
    float32, and gate, up and their product), attention's (hidden states, q, k, v in float32 for the
    rotation and again in the dtype, the output), and the sampler's (raw and edited logits and five
    more arrays of their size, float32, beside the hidden states). Several devices add three float32
    hidden states around the all-reduce. Every array is counted whole where devices share it
    unevenly. Log probabilities of the whole vocabulary, of the step before, where they may be asked
    for, the entries that edit 1024 tokens a row, and workspaces come on top: see
    `jaxllm.execution.step_memory`.
    """
    item = DTYPE_BYTES[shape.dtype]
    tokens, hidden = shape.max_num_batched_tokens, config.hidden_size
    mlp = -(-config.intermediate_size // shape.tp)
    heads = -(-(config.num_heads + 2 * config.num_kv_heads) // shape.tp) * config.head_dim
    states = tokens * hidden * (3 * item + 4 + (12 if shape.tp > 1 else 0))
    layer = states + max(3 * tokens * mlp * item, tokens * heads * (2 * item + 4))
    logits = 4 * shape.max_num_seqs * config.vocab_size
    sampler = (tokens + shape.max_num_seqs) * hidden * item + 7 * logits
    entries = shape.max_num_seqs * EDIT_ENTRIES * EDIT_ENTRY_BYTES
    results = logits if shape.all_logprobs else 0
    num_bytes = max(layer, sampler) + results + entries + WORKSPACE_BYTES
    return Activation(num_bytes, "upper bound by formula", compiled=False)


def can_compile() -> bool:
    """Whether JAX's CUDA plugin is installed, so that a step compiles without a GPU."""
    return any(_installed(name) for name in _CUDA_PLUGINS)


def compile_activation(hf_config: dict[str, Any], shape: StepShape, gpu: Gpu) -> Activation | None:
    """Memory of the real step programs, as the engine counts it, compiled for `gpu` in a process
    of its own.

    Returns None where the compile fails, with the reason in the log: a plan can go on with the
    bound. Takes up to a minute.

    Args:
      hf_config: the content of config.json.
    """
    job = {
        "hf_config": hf_config,
        "shape": dataclasses.asdict(shape),
        "gpu": dataclasses.asdict(gpu),
    }
    logger.info("compiling the step of the largest batch for %s, without one", gpu.name)
    try:
        # A JAX that is in use here may hold a GPU, and could not take the CPU for its backend.
        done = subprocess.run(
            [sys.executable, "-m", "jaxllm.planning.device_compile"],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            timeout=COMPILE_TIMEOUT_S,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        logger.warning("compiling for %s took over %.0f s", gpu.name, COMPILE_TIMEOUT_S)
        return None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        logger.warning("compiling for %s failed: %s", gpu.name, reason)
        return None
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    parts = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in answer["programs"].items())
    return Activation(
        max(answer["programs"].values()) + answer["code"],
        f"step compiled for {gpu.name} ({parts}; attention: {answer['attention']})",
        compiled=True,
    )


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
