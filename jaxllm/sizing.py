"""Settles every limit of an engine: from the settings, the model and the machine."""

import dataclasses
import logging
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.execution.memory import (
    GIB,
    MIB,
    accelerator_pool_bytes,
    bytes_per_block,
    check_capacity,
    cpu_pool_bytes,
    num_blocks_for,
)
from jaxllm.execution.parameters import FunctionalModel
from jaxllm.execution.programs import Programs, RunnerConfig
from jaxllm.execution.step import AttentionPlan
from jaxllm.execution.step_memory import ProgramMemory, largest_programs, step_memory
from jaxllm.sampling_params import allows_all_logprobs

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Step limits by kind of machine, where the user sets none."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int


CPU_LIMITS = Limits(64, 512, 32)
SMALL_ACCELERATOR_LIMITS = Limits(256, 8192, 16)
LARGE_ACCELERATOR_LIMITS = Limits(1024, 16384, 16)
LARGE_ACCELERATOR_BYTES = 70 * GIB

# Of the most probable tokens, where a request may ask for any number: more than this takes the
# program that returns the whole vocabulary.
NUM_TOP = 20


def size_engine(
    config: EngineConfig,
    model: FunctionalModel,
    plan: AttentionPlan,
    progress: bool,
    fixed_shapes: bool = False,
) -> RunnerConfig:
    """Every limit, with the pool sized and the longest request settled; logs the capacity.

    Raises:
      ConfigError: limits contradict each other, or a full-length request does not fit.
    """
    device = plan.mesh.devices.flat[0]
    draft = _step_limits(config, model, default_limits(device), progress)
    draft = dataclasses.replace(draft, fixed_shapes=fixed_shapes)
    block_bytes = bytes_per_block(
        model.config, plan.heads, draft.block_size, np.dtype(plan.kv_dtype), plan.mesh.size
    )
    num_blocks = config.num_blocks
    if num_blocks is None:
        num_blocks = num_blocks_for(_pool_bytes(config, model, plan, draft), block_bytes)
    max_model_len = draft.max_model_len
    capacity = max((num_blocks - 1) * draft.block_size, 0)
    if _length(config) is None and 2 <= capacity < max_model_len - 1:
        logger.warning(
            "max_model_len lowered from %d to %d, which is what the KV pool holds; raise "
            "--kv-cache-memory or --gpu-memory-utilization for more",
            max_model_len,
            capacity,
        )
        max_model_len = capacity
    check_capacity(num_blocks, draft.block_size, block_bytes, max_model_len)
    logger.info(
        "KV pool: %d blocks of %d tokens, %.0f MiB per device: %d tokens, %.1f requests of %d",
        num_blocks - 1,
        draft.block_size,
        num_blocks * block_bytes / MIB,
        capacity,
        capacity / max_model_len,
        max_model_len,
    )
    return dataclasses.replace(draft, max_model_len=max_model_len, num_blocks=num_blocks)


def _step_limits(
    config: EngineConfig, model: FunctionalModel, defaults: Limits, progress: bool
) -> RunnerConfig:
    """All limits but the number of blocks, which stands at the least possible."""
    limit = model.config.max_position_embeddings
    max_model_len = _length(config) or limit
    if max_model_len > limit:
        raise ConfigError(
            f"max_model_len={max_model_len} is above the model's max_position_embeddings={limit}"
        )
    max_num_seqs = config.max_num_seqs or defaults.max_num_seqs
    max_tokens = config.max_num_batched_tokens
    if max_tokens is None:
        max_tokens = max(defaults.max_num_batched_tokens, max_num_seqs)
        if not config.enable_chunked_prefill:
            max_tokens = max(max_tokens, max_model_len)
    if max_tokens < max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens={max_tokens} is below max_num_seqs={max_num_seqs}: "
            "a step could not give every running request a token"
        )
    all_logprobs = allows_all_logprobs(config.max_logprobs, model.config.vocab_size)
    return RunnerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_tokens,
        max_model_len=max_model_len,
        block_size=config.block_size or defaults.block_size,
        num_blocks=2,
        num_top=NUM_TOP if all_logprobs else config.max_logprobs,
        all_logprobs=all_logprobs,
        processed_logprobs=config.logprobs_mode == "processed_logprobs",
        enforce_eager=config.enforce_eager,
        progress=progress,
    )


def _length(config: EngineConfig) -> int | None:
    """The length the user insists on, None where it may be chosen."""
    return config.max_model_len if isinstance(config.max_model_len, int) else None


def default_limits(device: jax.Device) -> Limits:
    """Limits for the kind of machine this device is."""
    if device.platform == "cpu":
        return CPU_LIMITS
    stats = device.memory_stats() or {}
    large = stats.get("bytes_limit", 0) >= LARGE_ACCELERATOR_BYTES
    return LARGE_ACCELERATOR_LIMITS if large else SMALL_ACCELERATOR_LIMITS


def _pool_bytes(
    config: EngineConfig, model: FunctionalModel, plan: AttentionPlan, draft: RunnerConfig
) -> int:
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory
    device = plan.mesh.devices.flat[0]
    if device.platform == "cpu":
        return cpu_pool_bytes()
    return _rest_of(device, config, model, plan, draft)


def _rest_of(
    device: jax.Device,
    config: EngineConfig,
    model: FunctionalModel,
    plan: AttentionPlan,
    draft: RunnerConfig,
) -> int:
    """Bytes of an accelerator that neither parameters nor a step take."""
    # What a step needs beside the pool does not depend on the pool's size, so the largest programs
    # compiled for a pool of two blocks tell what is left for the real one.
    probe = Programs(model, plan, draft)
    keys = largest_programs(draft)
    with ThreadPoolExecutor() as threads:
        measured = list(threads.map(lambda key: ProgramMemory.of(probe.compile(key)), keys))
    step = step_memory(dict(zip(keys, measured, strict=True)))
    return accelerator_pool_bytes(
        device, config.gpu_memory_utilization, model.num_bytes_per_device, step.peak, step.code
    )
