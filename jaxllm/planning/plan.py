"""The planner: from a config.json and a device's memory to what will fit, and how fast at best."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.planning.activation import Activation, can_compile, compile_activation
from jaxllm.planning.bounds import DecodePoint, PrefillPoint, decode_points, prefill_points
from jaxllm.planning.gpus import Gpu, find_gpu
from jaxllm.planning.model_source import read_model
from jaxllm.planning.recommend import (
    Knob,
    length_knob,
    seqs_knob,
    token_budget_knob,
    utilization_knob,
)
from jaxllm.planning.roofline import Roofline
from jaxllm.planning.sizes import Sizes
from jaxllm.planning.weights import DTYPE_BYTES, KV_DTYPE_BYTES, QUANTIZATIONS
from jaxllm.sampling_params import allows_all_logprobs

if TYPE_CHECKING:
    from jaxllm.sizing import Limits

CPU = "cpu"
DEFAULT_MEAN_CONTEXT = 2048
DEFAULT_TARGET_ITL_S = 0.05
DEFAULT_STEP_S = 0.25


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What fits and how fast at best. Sizes are bytes on one device unless said otherwise.

    Attributes:
      device: name of the GPU, "cpu", or the memory that was given.
      memory_bytes: memory of the device; None where only the pool's size is known.
      num_params: parameters of the whole model.
      activation_bytes: arrays and temporaries of the largest step.
      activation_source: a compile, or a formula's upper bound.
      pool_bytes: KV pool, 0 where the weights alone do not fit.
      num_blocks: P, the null block included.
      num_tokens: tokens the pool holds: (P - 1) * block_size.
      max_model_len: most tokens of a request.
      full_length_requests: num_tokens / max_model_len.
      largest_context: longest request that fits, at most the model's own limit.
      fits: one request of max_model_len runs.
      smallest_tp: fewest devices on which that is so, None if more than 64 or unknown.
      knobs: the recommended settings.
      roofline: of a step, None where the machine's speed is not known.
      decode, prefill: bounds by the roofline.
      notes: what the reader must know beside the numbers.
    """

    model: str
    device: str
    memory_bytes: int | None
    dtype: str
    kv_cache_dtype: str
    quantization: str | None
    tensor_parallel_size: int
    block_size: int
    num_params: int
    weight_bytes: int
    kv_bytes_per_token: int
    activation_bytes: int
    activation_source: str
    reserve_bytes: int
    pool_bytes: int
    num_blocks: int
    num_tokens: int
    max_model_len: int
    full_length_requests: float
    largest_context: int
    fits: bool
    smallest_tp: int | None
    knobs: tuple[Knob, ...]
    roofline: Roofline | None
    decode: tuple[DecodePoint, ...]
    prefill: tuple[PrefillPoint, ...]
    notes: tuple[str, ...]

    def knob(self, name: str) -> Knob:
        """The recommendation of this name; KeyError where the device has none."""
        for knob in self.knobs:
            if knob.name == name:
                return knob
        raise KeyError(name)


def plan(
    model: str | Path | Mapping[str, Any],
    *,
    gpu: str | None = None,
    memory: int | None = None,
    kv_cache_memory: int | None = None,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    quantization: str | None = None,
    tensor_parallel_size: int = 1,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    block_size: int | None = None,
    gpu_memory_utilization: float | None = None,
    max_logprobs: int = 20,
    mean_context: int | None = None,
    target_itl: float = DEFAULT_TARGET_ITL_S,
    max_step_time: float = DEFAULT_STEP_S,
    compile_step: bool | None = None,
    revision: str | None = None,
) -> Plan:
    """Plans a model on a device, from its config.json alone.

    The capacity is what the engine would log at start-up with the same settings; settings that are
    not given take the recommended values.

    Args:
      model: a name in MODELS, a folder, a .gguf file, a hub id, or the content of config.json.
      gpu: a name in GPUS, or "cpu".
      memory: bytes of an accelerator that is not in the table.
      kv_cache_memory: bytes of the KV pool on one device, instead of what is left.
      dtype: of weights and activations; auto takes the checkpoint's.
      kv_cache_dtype: one of KV_DTYPE_BYTES; auto takes that of the weights.
      quantization: one of QUANTIZATIONS for the weights of the layers, or None.
      max_logprobs: the engine's; -1, or a whole vocabulary, takes memory of the step.
      mean_context: tokens that a running request holds on average, for max_num_seqs; default:
        2048, or max_model_len if that is less.
      target_itl: seconds between two tokens that decoding should keep, for max_num_seqs.
      max_step_time: seconds that a step of prompt tokens may take, for max_num_batched_tokens.
      compile_step: compile the real step for `gpu` to know its memory; None does so where
        JAX's CUDA plugin is installed.

    Raises:
      ConfigError: the settings contradict each other or the model, or a name is not known.
      CheckpointError: the model is not found.
    """
    # The engine's own checks of the settings that it shares.
    EngineConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        tensor_parallel_size=tensor_parallel_size,
        kv_cache_memory=kv_cache_memory,
        max_logprobs=max_logprobs,
        gpu_memory_utilization=1.0 if gpu_memory_utilization is None else gpu_memory_utilization,
    )
    for field, number in (
        ("memory", memory),
        ("mean_context", mean_context),
        ("target_itl", target_itl),
        ("max_step_time", max_step_time),
    ):
        if number is not None and not number > 0:
            raise ConfigError(f"{field}={number!r}: must be positive")
    if gpu is None and memory is None and kv_cache_memory is None:
        raise ConfigError("give a GPU, a memory size or the size of the KV pool (kv_cache_memory)")
    if gpu is not None and memory is not None:
        raise ConfigError(f"gpu={gpu!r} and memory={memory}: give one of the two")
    name, hf_config, config, dtype = read_model(model, dtype, revision)
    kv_dtype = dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    for field, value, allowed in (
        ("dtype", dtype, DTYPE_BYTES),
        ("kv_cache_dtype", kv_dtype, KV_DTYPE_BYTES),
        ("quantization", quantization, QUANTIZATIONS),
    ):
        if value is not None and value not in allowed:
            raise ConfigError(f"{field}={value!r}: one of {', '.join(allowed)}")
    limit = config.max_position_embeddings
    if max_model_len is not None and not 2 <= max_model_len <= limit:
        raise ConfigError(
            f"max_model_len={max_model_len}: from 2 to the model's max_position_embeddings={limit}"
        )
    part = None if gpu is None or gpu == CPU else find_gpu(gpu)
    if part is not None:
        memory = part.memory_bytes
    if gpu == CPU and kv_cache_memory is None:
        from jaxllm.execution.memory import cpu_pool_bytes

        kv_cache_memory = cpu_pool_bytes()
    limits = _limits(gpu, memory)
    sizes = Sizes(
        config=config,
        dtype=dtype,
        kv_dtype=kv_dtype,
        quantization=quantization,
        block_size=block_size or limits.block_size,
        memory=memory,
        kv_cache_memory=kv_cache_memory,
        max_model_len=max_model_len or limit,
        all_logprobs=allows_all_logprobs(max_logprobs, config.vocab_size),
    )
    tp = tensor_parallel_size
    roofline = None
    if part is not None:
        roofline = Roofline.of(
            config,
            part,
            dtype=dtype,
            weight_bytes=sizes.weights(tp),
            kv_token_bytes=sizes.token_bytes(tp),
            tp=tp,
        )
    utilization = None
    if memory is not None and kv_cache_memory is None:
        utilization = utilization_knob(memory, tp)
        if gpu_memory_utilization is not None:
            utilization = _asked("gpu_memory_utilization", gpu_memory_utilization)
    share = utilization.value if utilization else 1.0
    if max_num_batched_tokens is not None:
        budget = _asked("max_num_batched_tokens", max_num_batched_tokens)
    else:
        per_token = sizes.activation(tp, 1, 4096).num_bytes // 4096
        default = limits.max_num_batched_tokens
        budget = token_budget_knob(roofline, default, max_step_time, memory, per_token)
    tokens = int(budget.value)
    if max_num_seqs is not None:
        seqs = _asked("max_num_seqs", max_num_seqs)
    else:
        capacity = sizes.pool(tp, share, sizes.activation(tp, 1, tokens)).num_tokens
        mean = mean_context or min(DEFAULT_MEAN_CONTEXT, sizes.max_model_len)
        seqs = seqs_knob(roofline, capacity, mean, target_itl, tokens, limits.max_num_seqs)
    if budget.value < seqs.value:
        raise ConfigError(
            f"max_num_batched_tokens={budget.value} is below max_num_seqs={seqs.value}: "
            "a step could not give every running request a token"
        )
    rows = int(seqs.value)
    activation = sizes.activation(tp, rows, tokens)
    if part is not None and kv_cache_memory is None and compile_step is not False:
        if can_compile():
            shape = sizes.shape(tp, rows, tokens)
            activation = compile_activation(hf_config, shape, part) or activation
        elif compile_step:
            raise ConfigError(
                "compile_step=True: JAX's CUDA plugin is not installed "
                "(pip install jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc)"
            )
    pool = sizes.pool(tp, share, activation)
    smallest_tp = sizes.smallest_tp(gpu_memory_utilization, rows, tokens, {tp: activation})
    length = length_knob(max_model_len, limit, pool.num_tokens)
    return Plan(
        model=name,
        device=gpu or (f"{memory / 2**30:.1f} GiB" if memory else "given pool"),
        memory_bytes=memory,
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        quantization=quantization,
        tensor_parallel_size=tp,
        block_size=sizes.block_size,
        num_params=config.num_params,
        weight_bytes=sizes.weights(tp),
        kv_bytes_per_token=sizes.token_bytes(tp),
        activation_bytes=0 if kv_cache_memory else activation.num_bytes,
        activation_source="not counted: the pool's size is given"
        if kv_cache_memory
        else activation.source,
        reserve_bytes=pool.reserve,
        pool_bytes=pool.num_bytes,
        num_blocks=pool.num_blocks,
        num_tokens=pool.num_tokens,
        max_model_len=int(length.value),
        full_length_requests=pool.num_tokens / length.value,
        largest_context=min(limit, pool.num_tokens),
        fits=pool.num_tokens >= length.value - 1,
        smallest_tp=smallest_tp,
        knobs=tuple(k for k in (length, seqs, budget, utilization) if k is not None),
        roofline=roofline,
        decode=decode_points(roofline, rows, pool.num_tokens, limit),
        prefill=prefill_points(roofline, tokens),
        notes=_notes(kv_dtype, quantization, activation, part, kv_cache_memory),
    )


def _asked(name: str, value: float | int) -> Knob:
    return Knob(name, value, "asked for")


def _limits(gpu: str | None, memory: int | None) -> "Limits":
    from jaxllm import sizing

    if gpu == CPU:
        return sizing.CPU_LIMITS
    if memory is not None and memory >= sizing.LARGE_ACCELERATOR_BYTES:
        return sizing.LARGE_ACCELERATOR_LIMITS
    return sizing.SMALL_ACCELERATOR_LIMITS


def _notes(
    kv_dtype: str,
    quantization: str | None,
    activation: Activation,
    part: Gpu | None,
    kv_cache_memory: int | None,
) -> tuple[str, ...]:
    notes = []
    if kv_cache_memory is None and not activation.compiled:
        notes.append(
            "the memory of a step is an upper bound by formula, so somewhat more may fit"
            + ("; with JAX's CUDA plugin installed the real step is compiled" if part else "")
        )
    try:
        EngineConfig(kv_cache_dtype=kv_dtype)  # type: ignore[arg-type]
    except ConfigError:
        notes.append(f"this version of the engine has no KV cache of {kv_dtype}")
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    if quantization is not None and "quantization" not in fields:
        notes.append(f"this version of the engine does not run {quantization} weights")
    if part is not None:
        notes.append(
            f"speeds are bounds from the data sheet ({part.source}); engines reach 60 to 80 %"
        )
    return tuple(notes)
