"""Start-up: from an EngineConfig to a model on its devices, compiled and ready to step."""

import dataclasses
import logging
import os
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jaxllm
import pallas_kernels
from jaxllm.checkpoints.load import load_params
from jaxllm.checkpoints.resolve import Checkpoint, checkpoint_dtype, resolve
from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.engine.scheduler import SchedulerConfig
from jaxllm.errors import ConfigError
from jaxllm.execution.compilation import (
    CACHE_DIR_VARIABLE,
    compile_counts,
    cut_persistent_cache,
    default_cache_dir,
    enable_persistent_cache,
)
from jaxllm.execution.fingerprint import changed_since_start, fingerprint, hash_sources
from jaxllm.execution.gradients import causal_attend, differentiable_ops
from jaxllm.execution.huge_pages import in_huge_pages
from jaxllm.execution.invariance import check_batch_invariance
from jaxllm.execution.mesh import HeadLayout, make_mesh
from jaxllm.execution.ops import choose_ops, product_impl
from jaxllm.execution.parameters import FunctionalModel
from jaxllm.execution.program_store import ProgramStore
from jaxllm.execution.quantization import prepare
from jaxllm.execution.runner import Runner
from jaxllm.execution.step import AttentionPlan
from jaxllm.models.config import ModelConfig
from jaxllm.models.registry import ModelFamily, find_family
from jaxllm.sampling_params import sampling_defaults
from jaxllm.sizing import default_limits, size_engine
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer, tokenizer_format
from pallas_kernels.paged_attention.contract import Case
from pallas_kernels.paged_attention.pool import pool_dtype
from pallas_kernels.paged_attention.registry import get_implementation, select_impl

logger = logging.getLogger(__name__)


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
    cache_folder = Path(cache_dir) if cache_dir else default_cache_dir()
    enable_persistent_cache(cache_folder)
    compiled = compile_counts().compiled
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
    ops = choose_ops(
        device.platform, mesh.size, config.batch_invariant, config.quantization == "int8"
    )
    model = FunctionalModel.build(family, model_config, dtype, mesh, ops)
    plan = _plan_attention(config, model_config, mesh, dtype, kv_dtype)
    # The C++ kernels compute each row alone; other programs keep a row's bits in one shape at best.
    own_rows = plan.impl == "cpu" and product_impl(device.platform, mesh.size) == "ffi"
    fixed_shapes = config.batch_invariant and not own_rows
    runner_config = size_engine(config, model, plan, progress, fixed_shapes)
    params = load_params(
        checkpoint, model.source, ignore=model.ignored_names, seed=config.seed, progress=progress
    )
    params = in_huge_pages(prepare(params, model))
    loaded = time.monotonic()
    store = _program_store(config, cache_folder, family, plan)
    runner = Runner(model, params, plan, runner_config, store)
    if config.batch_invariant:
        check_batch_invariance(runner)
    if compile_counts().compiled > compiled:
        _cut_cache(config, cache_folder, time.monotonic() - began)
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
        generation_config=_defaults(config, checkpoint),
    )


def _program_store(
    config: EngineConfig, cache_folder: Path, family: ModelFamily, plan: AttentionPlan
) -> ProgramStore | None:
    """Where this model's programs are kept whole, or None where their key could not be trusted.

    The key covers the sources of these packages, so all that makes a program must be theirs. On
    accelerators code is only loaded after what it calls was imported by tracing, so there JAX's
    own cache serves alone.
    """
    attend = get_implementation(plan.impl).attend
    own = family.module.__module__.startswith("jaxllm.")
    own = own and getattr(attend, "__module__", "").startswith("pallas_kernels.")
    devices = list(plan.mesh.devices.flat)
    packages = [Path(module.__path__[0]) for module in (jaxllm, pallas_kernels)]
    if not own or devices[0].platform != "cpu" or changed_since_start(packages):
        return None
    sources = " ".join(hash_sources(package) for package in packages)
    return ProgramStore(
        cache_folder / "programs",
        sources,
        fingerprint(devices),
        config.compilation_cache_max_size,
    )


def _cut_cache(config: EngineConfig, cache_folder: Path, keep_seconds: float) -> None:
    # A folder that the environment names serves other programs of the user's, too.
    if config.compilation_cache_dir or not os.environ.get(CACHE_DIR_VARIABLE):
        cut_persistent_cache(cache_folder, config.compilation_cache_max_size, keep_seconds)


def training_model(engine: Engine) -> FunctionalModel:
    """The engine's network built for training: functions of the same parameters that have
    gradients."""
    if engine.config.quantization is not None:
        raise ConfigError(
            f"quantization={engine.config.quantization!r}: rounded weights have no gradients; "
            "train on the model's own weights and hand them to update_weights"
        )
    runner = engine.runner
    plan, block_size = runner.programs.plan, runner.config.block_size
    platform = runner.programs.platform
    some = next(iter(runner.model.abstract.values()))
    return FunctionalModel.build(
        find_family(engine.checkpoint.config),
        engine.model_config,
        some.dtype,
        plan.mesh,
        differentiable_ops(platform, plan.mesh.size),
        causal_attend(platform, plan, block_size),
    )


def _load_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    if config.skip_tokenizer_init:
        return None
    source = config.tokenizer or checkpoint.path
    return load_tokenizer(source, format=tokenizer_format(source), revision=config.revision)


def _plan_attention(
    config: EngineConfig, model: ModelConfig, mesh: Mesh, dtype: np.dtype, kv_dtype: np.dtype
) -> AttentionPlan:
    """Chooses the attention for what every step of this model will ask of it."""
    device = mesh.devices.flat[0]
    heads = HeadLayout.of(model, mesh.size)
    case = Case(
        query_tokens=1,
        requests=1,
        query_heads=model.num_heads // mesh.size,
        kv_heads=heads.num_kv_heads // mesh.size,
        head_dim=model.head_dim,
        block_size=config.block_size or default_limits(device).block_size,
        table_width=1,
        query_dtype="float32" if device.platform == "cpu" else dtype.name,
        kv_dtype=kv_dtype.name,
        pool_dtype=pool_dtype(kv_dtype, device.platform).name,
        window=next((window for window in model.windows if window), None),
    )
    impl = select_impl(
        config.attention_backend,
        platform=device.platform,
        compute_capability=getattr(device, "compute_capability", None),
        case=case,
    )
    return AttentionPlan(impl, heads, kv_dtype, mesh)


def _defaults(config: EngineConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    """The content of generation_config.json as far as it is asked for; says what it changes."""
    taken = checkpoint.generation_config if config.generation_config == "auto" else {}
    changed = ", ".join(f"{key}={value}" for key, value in sampling_defaults(taken).items())
    logger.info(
        "default sampling parameters: %s",
        f"{changed} from generation_config.json" if changed else "the general ones",
    )
    return taken


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
