"""The planner: from a config.json and a device's memory to what will fit, and how fast at best."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.planning.activation import (
    Activation,
    StepShape,
    activation_bound,
    can_compile,
    compile_activation,
)
from jaxllm.planning.gpus import Gpu, find_gpu
from jaxllm.planning.models_table import MODELS, find_model
from jaxllm.planning.recommend import (
    Knob,
    length_knob,
    seqs_knob,
    token_budget_knob,
    utilization_knob,
)
from jaxllm.planning.roofline import Roofline
from jaxllm.planning.weights import DTYPE_BYTES, KV_DTYPE_BYTES, QUANTIZATIONS, weight_bytes

if TYPE_CHECKING:
    from jaxllm.models.config import ModelConfig
    from jaxllm.sizing import Limits

CPU = "cpu"
DEFAULT_MEAN_CONTEXT = 2048
DEFAULT_TARGET_ITL_S = 0.05
DEFAULT_STEP_S = 0.25
TP_SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclasses.dataclass(frozen=True, slots=True)
class DecodePoint:
    """A decode step at the roofline: `batch` requests of `context` tokens each.

    Attributes:
      seconds: least time of the step.
      tokens_per_second: of all requests together, at most.
      bound: "memory" or "compute".
    """

    batch: int
    context: int
    seconds: float
    tokens_per_second: float
    bound: str


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillPoint:
    """A step of `tokens` prompt tokens of one request at the roofline."""

    tokens: int
    seconds: float
    tokens_per_second: float


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What fits and how fast at best. Sizes are bytes on one device unless said otherwise.

    Attributes:
      device: name of the GPU, "cpu", or the memory that was given.
      memory_bytes: memory of the device; None where only the pool's size is known.
      num_params: parameters of the whole model.
      activation_bytes: temporaries of the largest step.
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
      mean_context: tokens that a running request holds on average, for max_num_seqs; default:
        2048, or max_model_len if that is less.
      target_itl: seconds between two tokens that decoding should keep, for max_num_seqs.
      max_step_time: seconds that a step of prompt tokens may take, for max_num_batched_tokens.
      compile_step: compile the real step for `gpu` to know its temporaries; None does so where
        JAX's CUDA plugin is installed.

    Raises:
      ConfigError: the settings contradict each other or the model, or a name is not known.
      CheckpointError: the model is not found.
    """
    if gpu is None and memory is None and kv_cache_memory is None:
        raise ConfigError("give a GPU, a memory size or the size of the KV pool (kv_cache_memory)")
    if gpu is not None and memory is not None:
        raise ConfigError(f"gpu={gpu!r} and memory={memory}: give one of the two")
    name, hf_config, config, dtype = _read_model(model, dtype, revision)
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
    sizes = _Sizes(
        config=config,
        hf_config=hf_config,
        dtype=dtype,
        kv_dtype=kv_dtype,
        quantization=quantization,
        block_size=block_size or limits.block_size,
        memory=memory,
        kv_cache_memory=kv_cache_memory,
        max_model_len=max_model_len or limit,
    )
    tp = tensor_parallel_size
    utilization = None
    if memory is not None and kv_cache_memory is None:
        utilization = (
            utilization_knob(memory, tp)
            if gpu_memory_utilization is None
            else Knob("gpu_memory_utilization", gpu_memory_utilization, "asked for")
        )
    share = utilization.value if utilization else 1.0
    roofline = None
    if part is not None:
        roofline = Roofline.of(
            config,
            part,
            dtype=dtype,
            weight_bytes=sizes.weights(tp),
            kv_token_bytes=sizes.block_bytes(tp) // sizes.block_size,
            tp=tp,
        )

    budget = (
        token_budget_knob(
            roofline,
            limits.max_num_batched_tokens,
            max_step_time,
            memory,
            sizes.activation(tp, 1, 4096).num_bytes // 4096,
        )
        if max_num_batched_tokens is None
        else Knob("max_num_batched_tokens", max_num_batched_tokens, "asked for")
    )
    mean = mean_context or min(DEFAULT_MEAN_CONTEXT, max_model_len or limit)
    first = sizes.pool(tp, share, sizes.activation(tp, 1, int(budget.value)))
    seqs = (
        seqs_knob(
            roofline,
            first.num_tokens,
            mean,
            target_itl,
            int(budget.value),
            limits.max_num_seqs,
        )
        if max_num_seqs is None
        else Knob("max_num_seqs", max_num_seqs, "asked for")
    )
    if budget.value < seqs.value:
        raise ConfigError(
            f"max_num_batched_tokens={budget.value} is below max_num_seqs={seqs.value}: "
            "a step could not give every running request a token"
        )

    activation = sizes.activation(tp, int(seqs.value), int(budget.value))
    if part is not None and kv_cache_memory is None and compile_step is not False:
        if can_compile():
            shape = sizes.shape(tp, int(seqs.value), int(budget.value))
            activation = compile_activation(hf_config, shape, part) or activation
        elif compile_step:
            raise ConfigError(
                "compile_step=True: JAX's CUDA plugin is not installed "
                "(pip install jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc)"
            )
    pool = sizes.pool(tp, share, activation)
    smallest_tp = sizes.smallest_tp(
        gpu_memory_utilization, int(seqs.value), int(budget.value), {tp: activation}
    )
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
        kv_bytes_per_token=sizes.block_bytes(tp) // sizes.block_size,
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
        decode=_decode_points(roofline, int(seqs.value), pool.num_tokens, limit),
        prefill=_prefill_points(roofline, int(budget.value)),
        notes=_notes(kv_dtype, quantization, activation, part, kv_cache_memory),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Pool:
    num_bytes: int
    num_blocks: int
    num_tokens: int
    reserve: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Sizes:
    """The memory arithmetic of one model as a function of tensor parallelism and step shape."""

    config: "ModelConfig"
    hf_config: dict[str, Any]
    dtype: str
    kv_dtype: str
    quantization: str | None
    block_size: int
    memory: int | None
    kv_cache_memory: int | None
    max_model_len: int

    def weights(self, tp: int) -> int:
        return weight_bytes(self.config, self.dtype, self.quantization, tp)

    def block_bytes(self, tp: int) -> int:
        """KV bytes of a block on one device; ConfigError if tp does not divide the heads."""
        from jaxllm.execution.mesh import HeadLayout

        heads = HeadLayout.of(self.config, tp).num_kv_heads // tp
        row = heads * self.config.head_dim * KV_DTYPE_BYTES[self.kv_dtype]
        return 2 * self.config.num_layers * self.block_size * row

    def shape(self, tp: int, seqs: int, budget: int) -> StepShape:
        return StepShape(
            seqs, budget, self.max_model_len, self.block_size, self.dtype, self.kv_dtype, tp
        )

    def activation(self, tp: int, seqs: int, budget: int) -> Activation:
        return activation_bound(self.config, self.shape(tp, seqs, budget))

    def pool(self, tp: int, utilization: float, activation: Activation) -> _Pool:
        """The pool as the engine sizes it."""
        from jaxllm.execution.memory import RESERVE_BYTES, num_blocks_for

        size, reserve = self.kv_cache_memory, 0
        if size is None:
            reserve = RESERVE_BYTES
            budget = int((self.memory or 0) * utilization)
            size = max(budget - self.weights(tp) - activation.num_bytes - reserve, 0)
        blocks = num_blocks_for(size, self.block_bytes(tp))
        return _Pool(size, blocks, max(blocks - 1, 0) * self.block_size, reserve)

    def smallest_tp(
        self, utilization: float | None, seqs: int, budget: int, known: dict[int, Activation]
    ) -> int | None:
        """Fewest devices on which one request of max_model_len runs."""
        for tp in TP_SIZES:
            try:
                activation = known.get(tp) or self.activation(tp, seqs, budget)
                share = utilization
                if share is None:
                    share = 1.0 if self.memory is None else utilization_knob(self.memory, tp).value
                if self.pool(tp, share, activation).num_tokens >= self.max_model_len - 1:
                    return tp
            except ConfigError:
                continue
        return None


def _read_model(
    model: str | Path | Mapping[str, Any], dtype: str, revision: str | None
) -> tuple[str, dict[str, Any], "ModelConfig", str]:
    """Name, config.json, its ModelConfig, and the dtype of the weights."""
    from jaxllm.checkpoints.errors import NotFoundError
    from jaxllm.checkpoints.resolve import Checkpoint, checkpoint_dtype, resolve
    from jaxllm.models.registry import find_family

    known = find_model(model) if isinstance(model, str) and not Path(model).exists() else None
    if isinstance(model, Mapping) or known is not None:
        content = dict(model) if isinstance(model, Mapping) else known or {}
        name = str(content.get("_name_or_path") or "config") if known is None else str(model)
        checkpoint = Checkpoint("dummy", Path(name), content, {}, name)
    else:
        path: str | Path = model
        try:
            checkpoint = resolve(path, revision=revision, load_format="dummy", progress=False)
        except NotFoundError as error:
            raise ConfigError(f"{error}; known by name: {', '.join(MODELS)}") from error
    config = find_family(checkpoint.config).read_config(checkpoint.config)
    chosen = checkpoint_dtype(checkpoint) if dtype == "auto" else dtype
    return checkpoint.name, checkpoint.config, config, chosen


def _limits(gpu: str | None, memory: int | None) -> "Limits":
    from jaxllm import sizing

    if gpu == CPU:
        return sizing.CPU_LIMITS
    if memory is not None and memory >= sizing.LARGE_ACCELERATOR_BYTES:
        return sizing.LARGE_ACCELERATOR_LIMITS
    return sizing.SMALL_ACCELERATOR_LIMITS


def _decode_points(
    roofline: Roofline | None, seqs: int, capacity: int, limit: int
) -> tuple[DecodePoint, ...]:
    if roofline is None:
        return ()
    points = []
    for context in sorted({min(c, limit) for c in (1024, 8192, 32768)}):
        for batch in sorted({1, 8, 32, 128, seqs}):
            if batch <= seqs and batch * context <= capacity:
                seconds = roofline.seconds(0, batch, batch * context)
                bound = roofline.bound_by(batch, batch * context)
                points.append(DecodePoint(batch, context, seconds, batch / seconds, bound))
    return tuple(points)


def _prefill_points(roofline: Roofline | None, budget: int) -> tuple[PrefillPoint, ...]:
    if roofline is None:
        return ()
    points = []
    for tokens in sorted({256, 1024, 4096, budget}):
        if tokens <= budget:
            seconds = roofline.seconds(tokens, 0, 0, tokens * (tokens + 1) // 2)
            points.append(PrefillPoint(tokens, seconds, tokens / seconds))
    return tuple(points)


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
            "temporaries are an upper bound by formula, so somewhat more may fit"
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
