"""Start-up: from an EngineConfig to a model on its devices, compiled and ready to step."""

import dataclasses
import logging
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.checkpoints.load import load_params
from jaxllm.checkpoints.resolve import Checkpoint, checkpoint_dtype, resolve
from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.engine.scheduler import SchedulerConfig
from jaxllm.errors import ConfigError
from jaxllm.execution.compilation import default_cache_dir, enable_persistent_cache
from jaxllm.execution.memory import (
    GIB,
    MIB,
    ProgramMemory,
    accelerator_pool_bytes,
    bytes_per_block,
    check_capacity,
    cpu_pool_bytes,
    num_blocks_for,
)
from jaxllm.execution.mesh import HeadLayout, make_mesh
from jaxllm.execution.ops import choose_ops
from jaxllm.execution.parameters import FunctionalModel
from jaxllm.execution.runner import ProgramKey, Runner, RunnerConfig
from jaxllm.execution.step import AttentionPlan
from jaxllm.models.config import ModelConfig
from jaxllm.models.registry import find_family
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer
from pallas_kernels.paged_attention.registry import select_impl

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


@dataclasses.dataclass(slots=True)
class Engine:
    """A started engine and what describes it.

    Attributes:
      config: the settings asked for.
      scheduler_config: the limits in force.
      eos_token_ids: every id that ends an output.
      generation_config: the model's own sampling defaults, {} where it has none.
    """

    config: EngineConfig
    model_config: ModelConfig
    scheduler_config: SchedulerConfig
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    core: EngineCore
    runner: Runner
    num_blocks: int
    eos_token_ids: frozenset[int]
    generation_config: dict[str, Any]


def start_engine(config: EngineConfig, progress: bool = True) -> Engine:
    """Resolves, loads, compiles and sizes.

    Raises:
      ConfigError: a setting cannot work with this model or machine.
      CheckpointError: the weights cannot be read.
    """
    began = time.monotonic()
    cache_dir = config.compilation_cache_dir
    enable_persistent_cache(Path(cache_dir) if cache_dir else default_cache_dir())
    checkpoint = resolve(
        config.model,
        revision=config.revision,
        load_format=config.load_format,
        progress=progress,
    )
    family = find_family(checkpoint.config)
    model_config = family.read_config(checkpoint.config)
    tokenizer = _load_tokenizer(config, checkpoint)

    mesh = make_mesh(config.tensor_parallel_size)
    device = mesh.devices.flat[0]
    dtype = jnp.dtype(checkpoint_dtype(checkpoint) if config.dtype == "auto" else config.dtype)
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else jnp.dtype(config.kv_cache_dtype)
    model = FunctionalModel.build(
        family, model_config, dtype, mesh, choose_ops(device.platform, dtype, mesh.size)
    )
    plan = AttentionPlan(
        impl=_attention_impl(config, device),
        heads=HeadLayout.of(model_config, mesh.size),
        kv_dtype=kv_dtype,
        mesh=mesh,
    )
    runner_config = _runner_config(config, model, plan, progress)
    params = load_params(
        checkpoint, model.abstract, ignore=model.ignored_names, seed=config.seed, progress=progress
    )
    loaded = time.monotonic()
    runner = Runner(model, params, plan, runner_config)
    scheduler_config = SchedulerConfig(
        max_num_seqs=runner_config.max_num_seqs,
        max_num_batched_tokens=runner_config.max_num_batched_tokens,
        max_model_len=runner_config.max_model_len,
        block_size=runner_config.block_size,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        enable_chunked_prefill=config.enable_chunked_prefill,
        policy=config.scheduling_policy,
    )
    use_async = config.async_scheduling
    core = EngineCore(
        scheduler_config,
        runner,
        num_blocks=runner_config.num_blocks,
        enable_prefix_caching=config.enable_prefix_caching,
        async_scheduling=device.platform != "cpu" if use_async is None else use_async,
    )
    logger.info(
        "%s ready: weights in %.1f s, programs and pool in %.1f s",
        checkpoint.name,
        loaded - began,
        time.monotonic() - loaded,
    )
    return Engine(
        config=config,
        model_config=model_config,
        scheduler_config=scheduler_config,
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        core=core,
        runner=runner,
        num_blocks=runner_config.num_blocks,
        eos_token_ids=_eos_token_ids(checkpoint, tokenizer),
        generation_config=checkpoint.generation_config if config.generation_config == "auto" else {},
    )


def _load_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is not None:
        other = resolve(config.tokenizer, load_format="dummy")
        return load_tokenizer(other.path, format=other.format)
    return load_tokenizer(checkpoint.path, format=checkpoint.format)


def _attention_impl(config: EngineConfig, device: jax.Device) -> str:
    if config.attention_backend != "auto":
        return select_impl(config.attention_backend)
    return select_impl(
        "auto",
        platform=device.platform,
        compute_capability=getattr(device, "compute_capability", None),
    )


def _limits(device: jax.Device) -> Limits:
    if device.platform == "cpu":
        return CPU_LIMITS
    stats = device.memory_stats() or {}
    large = stats.get("bytes_limit", 0) >= LARGE_ACCELERATOR_BYTES
    return LARGE_ACCELERATOR_LIMITS if large else SMALL_ACCELERATOR_LIMITS


def _runner_config(
    config: EngineConfig, model: FunctionalModel, plan: AttentionPlan, progress: bool
) -> RunnerConfig:
    """Every limit, with the pool sized and the longest request settled."""
    device = plan.mesh.devices.flat[0]
    defaults = _limits(device)
    max_num_seqs = config.max_num_seqs or defaults.max_num_seqs
    block_size = config.block_size or defaults.block_size
    limit = model.config.max_position_embeddings
    auto_length = config.max_model_len in (None, "auto")
    max_model_len = limit if auto_length else config.max_model_len
    if max_model_len > limit:
        raise ConfigError(
            f"max_model_len={max_model_len} is above the model's max_position_embeddings={limit}"
        )
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
    draft = RunnerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_tokens,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=2,
        enforce_eager=config.enforce_eager,
        progress=progress,
    )
    block_bytes = bytes_per_block(
        model.config, plan.heads, block_size, np.dtype(plan.kv_dtype), plan.mesh.size
    )
    num_blocks = config.num_blocks
    if num_blocks is None:
        num_blocks = num_blocks_for(_pool_bytes(config, model, plan, draft), block_bytes)
    if auto_length:
        fitting = max((num_blocks - 1) * block_size, 0)
        if fitting < max_model_len - 1 and fitting >= 2:
            logger.warning(
                "max_model_len lowered from %d to %d, which is what the KV pool holds; "
                "raise --kv-cache-memory or --gpu-memory-utilization for more",
                max_model_len,
                fitting,
            )
            max_model_len = fitting
    check_capacity(num_blocks, block_size, block_bytes, max_model_len)
    capacity = (num_blocks - 1) * block_size
    logger.info(
        "KV pool: %d blocks of %d tokens, %.0f MiB per device: %d tokens, %.1f requests of %d",
        num_blocks - 1,
        block_size,
        num_blocks * block_bytes / MIB,
        capacity,
        capacity / max_model_len,
        max_model_len,
    )
    return dataclasses.replace(draft, max_model_len=max_model_len, num_blocks=num_blocks)


def _pool_bytes(
    config: EngineConfig, model: FunctionalModel, plan: AttentionPlan, draft: RunnerConfig
) -> int:
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory
    device = plan.mesh.devices.flat[0]
    if device.platform == "cpu":
        return cpu_pool_bytes()
    # The temporaries of a program do not depend on the size of the pool, so the largest programs
    # compiled for a pool of two blocks tell what is left for the real one.
    probe = Runner(model, model.abstract, plan, dataclasses.replace(draft, enforce_eager=True))
    largest = [
        ProgramKey("forward", draft.max_num_batched_tokens),
        ProgramKey("logits", draft.max_num_seqs),
        ProgramKey("sample", draft.max_num_seqs, 2),
    ]
    programs = [ProgramMemory.of(probe.compile(key)) for key in largest]
    return accelerator_pool_bytes(
        device, config.gpu_memory_utilization, model.num_bytes_per_device, programs
    )


def _eos_token_ids(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> frozenset[int]:
    ids: set[int] = set()
    for source in (checkpoint.generation_config, checkpoint.config):
        value = source.get("eos_token_id")
        if value is not None:
            ids |= set(value) if isinstance(value, list) else {value}
            break
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)
