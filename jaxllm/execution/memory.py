"""How much memory the KV pool may take, and how many blocks that is."""

import logging

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.execution.mesh import HeadLayout
from jaxllm.models.config import ModelConfig

logger = logging.getLogger(__name__)

MIB = 2**20
GIB = 2**30
# Room for the runtime's own allocations and for fragments.
RESERVE_BYTES = 512 * MIB
# Sizes are cut to whole groups of blocks, so that a few bytes more or less on the device do not
# change the shapes that programs are cached under.
BLOCK_GROUP = 64
DEFAULT_CPU_KV_BYTES = 2 * GIB


def bytes_per_block(
    config: ModelConfig, heads: HeadLayout, block_size: int, kv_dtype: np.dtype, num_devices: int
) -> int:
    """KV bytes of one block on one device, K and V of all layers."""
    kv_heads = heads.num_kv_heads // num_devices
    per_layer = 2 * kv_heads * block_size * config.head_dim * jnp.dtype(kv_dtype).itemsize
    return config.num_layers * per_layer


def cpu_pool_bytes() -> int:
    """Default pool size on a CPU: 2 GiB, but at most an eighth of the machine's memory."""
    try:
        with open("/proc/meminfo") as file:
            total = int(file.readline().split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return DEFAULT_CPU_KV_BYTES
    return min(DEFAULT_CPU_KV_BYTES, total // 8)


def accelerator_pool_bytes(
    device: jax.Device,
    utilization: float,
    parameter_bytes: int,
    step_bytes: int,
    code_bytes: int,
) -> int:
    """Bytes left for the pool on one accelerator: limit * utilization - parameters - step - code -
    reserve.

    Args:
      step_bytes: the arrays of a step and the temporaries of its programs.
      code_bytes: of the programs.

    Raises:
      ConfigError: nothing is left; the message gives the parts.
    """
    stats = device.memory_stats()
    if stats is None or "bytes_limit" not in stats:
        raise ConfigError(
            f"{device} does not report its memory; give the pool's size with --kv-cache-memory"
        )
    budget = int(stats["bytes_limit"] * utilization)
    left = budget - parameter_bytes - step_bytes - code_bytes - RESERVE_BYTES
    logger.info(
        "memory of %s: budget %.2f GiB = %.2f x %.2f, parameters %.2f, a step %.2f, "
        "code %.2f, reserve %.2f, left for KV %.2f",
        device, budget / GIB, utilization, stats["bytes_limit"] / GIB, parameter_bytes / GIB,
        step_bytes / GIB, code_bytes / GIB, RESERVE_BYTES / GIB, left / GIB,
    )  # fmt: skip
    if left <= 0:
        raise ConfigError(
            f"no memory is left for the KV pool: {budget / GIB:.2f} GiB "
            f"(gpu_memory_utilization={utilization}) minus parameters {parameter_bytes / GIB:.2f}, "
            f"a step {step_bytes / GIB:.2f}, code {code_bytes / GIB:.2f} and a reserve of "
            f"{RESERVE_BYTES / GIB:.2f} GiB; lower max_num_batched_tokens or max_num_seqs, raise "
            "tensor_parallel_size or gpu_memory_utilization"
        )
    return left


def num_blocks_for(pool_bytes: int, block_bytes: int) -> int:
    """Blocks, the null block included, that fit in pool_bytes."""
    blocks = pool_bytes // block_bytes
    return blocks // BLOCK_GROUP * BLOCK_GROUP if blocks > 4 * BLOCK_GROUP else blocks


def check_capacity(num_blocks: int, block_size: int, block_bytes: int, max_model_len: int) -> None:
    """Raises ConfigError if one full-length request does not fit, with the length that would."""
    capacity = max(num_blocks - 1, 0) * block_size
    # The last token of a full-length request is never fed back.
    if capacity < max_model_len - 1:
        needed = (-(-(max_model_len - 1) // block_size) + 1) * block_bytes
        raise ConfigError(
            f"the KV pool holds {capacity} tokens ({num_blocks - 1} blocks of {block_size}, "
            f"{num_blocks * block_bytes / MIB:.0f} MiB), but one request of max_model_len="
            f"{max_model_len} needs {needed / MIB:.0f} MiB; set --max-model-len to at most "
            f"{capacity} (or 'auto'), or give the pool more memory (--kv-cache-memory, "
            "--gpu-memory-utilization)"
        )
