"""Runner: the device side of a step. Holds parameters, pools and the compiled programs."""

import dataclasses
import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxllm.engine.step_plan import StepPlan, StepResult
from jaxllm.execution.batch import GREEDY, NEEDS, BatchLayout, BatchPacker
from jaxllm.execution.buckets import coarse_buckets, decode_buckets, find_bucket, token_buckets
from jaxllm.execution.compilation import compile_all
from jaxllm.execution.mesh import TENSOR_AXIS, replicated
from jaxllm.execution.parameters import FunctionalModel, Params
from jaxllm.execution.step import AttentionPlan, Pools, forward, head_logits, sample_rows
from pallas_kernels.paged_attention.pool import allocate_pool, pool_dtype, pool_shape, pool_spec

logger = logging.getLogger(__name__)

# Implementations whose one program serves decode and mixed batches alike.
RAGGED_IMPLEMENTATIONS = ("cpu",)


@dataclasses.dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Limits that fix the shapes of programs and pools.

    Attributes:
      num_blocks: P, the null block included.
      enforce_eager: compile a bucket when it is first needed, not at start.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    enforce_eager: bool = False
    progress: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramKey:
    """Which program: its kind, its bucket (tokens or rows) and its variant.

    Attributes:
      kind: "forward", "logits" or "sample".
      size: tokens of a forward program, rows of the others.
      variant: decode (1) or mixed (0) for forward; the need for sample; 0 for logits.
    """

    kind: str
    size: int
    variant: int = 0

    def __str__(self) -> str:
        variants = {"forward": ("mixed", "decode"), "logits": ("",), "sample": NEEDS}
        return f"{self.kind} {self.size} {variants[self.kind][self.variant]}".rstrip()


@dataclasses.dataclass(slots=True)
class DeviceStep:
    """A dispatched step: its sampled ids are on their way to the host."""

    token_ids: jax.Array | None
    num_sampled: int

    def result(self) -> StepResult:
        if self.token_ids is None:
            return StepResult(np.zeros(0, np.int32))
        return StepResult(np.asarray(self.token_ids)[: self.num_sampled])


class Runner:
    """Packs plans, runs the programs of their buckets, and keeps the pools."""

    def __init__(
        self,
        model: FunctionalModel,
        params: Params,
        plan: AttentionPlan,
        config: RunnerConfig,
    ):
        self.model = model
        self.params = params
        self.plan = plan
        self.config = config
        self.mesh: Mesh = plan.mesh
        self._replicated = replicated(self.mesh)
        self._pool_sharding = NamedSharding(self.mesh, pool_spec(TENSOR_AXIS))
        self._table_width = -(-config.max_model_len // config.block_size)
        self._row_buckets = decode_buckets(config.max_num_seqs)
        self._coarse_row_buckets = coarse_buckets(self._row_buckets)
        self._separate_decode = plan.impl not in RAGGED_IMPLEMENTATIONS
        self._token_buckets = token_buckets(config.max_num_batched_tokens)
        if not self._separate_decode:
            small = [b for b in self._row_buckets if b < config.max_num_batched_tokens]
            self._token_buckets = sorted({*self._token_buckets, *small})
        self._packer = BatchPacker(config.max_num_seqs, self._table_width, config.block_size)
        self._programs: dict[ProgramKey, jax.stages.Compiled] = {}
        if not config.enforce_eager:
            self._programs = compile_all(
                ((key, functools.partial(self.compile, key)) for key in self.program_keys()),
                progress=config.progress,
            )
        self._head_params = {name: params[name] for name in model.head_names}
        self._k_pools: Pools = []
        self._v_pools: Pools = []
        self._last_tokens: jax.Array
        self._allocate()

    def program_keys(self) -> list[ProgramKey]:
        """Every program a step can need, the largest first."""
        keys = [ProgramKey("forward", size) for size in reversed(self._token_buckets)]
        if self._separate_decode:
            keys += [ProgramKey("forward", size, 1) for size in reversed(self._row_buckets)]
        for need in reversed(range(len(NEEDS))):
            keys += [ProgramKey("sample", size, need) for size in reversed(self._rows_for(need))]
        keys += [ProgramKey("logits", size) for size in reversed(self._row_buckets)]
        return keys

    def compile(self, key: ProgramKey) -> jax.stages.Compiled:
        """Lowers and compiles one program from abstract shapes."""
        compiled = getattr(self, f"_lower_{key.kind}")(key).compile()
        logger.debug("program %s: %s", key, compiled.memory_analysis())
        return compiled

    def dispatch(self, plan: StepPlan) -> DeviceStep:
        """Starts the programs of a step; does not wait for them."""
        decode = self._separate_decode and plan.is_decode
        buckets = self._row_buckets if decode else self._token_buckets
        key = ProgramKey("forward", find_bucket(buckets, plan.num_tokens), int(decode))
        packed, num_sampled, need = self._packer.pack(plan, self._layout(key))
        hidden, sampling, self._k_pools, self._v_pools = self._program(key)(
            self.params,
            self._k_pools,
            self._v_pools,
            self._last_tokens,
            jax.device_put(packed, self._replicated),
        )
        if not num_sampled:
            return DeviceStep(None, 0)
        rows = find_bucket(self._rows_for(need), num_sampled)
        logits = self._program(ProgramKey("logits", rows))(self._head_params, hidden)
        token_ids, self._last_tokens = self._program(ProgramKey("sample", rows, need))(
            logits, sampling, self._last_tokens
        )
        token_ids.copy_to_host_async()
        return DeviceStep(token_ids, num_sampled)

    def reset(self) -> None:
        """Forgets the slots, and makes the pools anew if a failed step consumed them."""
        self._packer.reset()
        held = [*self._k_pools, *self._v_pools, self._last_tokens]
        if any(array.is_deleted() for array in held):
            self._allocate()

    def _rows_for(self, need: int) -> list[int]:
        return self._row_buckets if need == GREEDY else self._coarse_row_buckets

    def _program(self, key: ProgramKey) -> jax.stages.Compiled:
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self.compile(key)
        return program

    def _layout(self, key: ProgramKey) -> BatchLayout:
        requests = min(key.size, self.config.max_num_seqs)
        return BatchLayout(self.config.max_num_seqs, key.size, requests, self._table_width)

    def _allocate(self) -> None:
        config, model = self.config, self.model.config
        pools = [
            allocate_pool(
                config.num_blocks,
                self.plan.heads.num_kv_heads,
                config.block_size,
                model.head_dim,
                self.plan.kv_dtype,
                platform=self._platform,
                sharding=self._pool_sharding,
            )
            for _ in range(model.num_layers)
        ]
        self._k_pools = [k for k, _ in pools]
        self._v_pools = [v for _, v in pools]
        self._last_tokens = jnp.zeros(config.max_num_seqs + 1, jnp.int32, device=self._replicated)

    @property
    def _platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    def _abstract(self, shape: tuple[int, ...], dtype: Any, sharding=None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding or self._replicated)

    def _abstract_pools(self) -> list[jax.ShapeDtypeStruct]:
        config, model = self.config, self.model.config
        shape = pool_shape(
            config.num_blocks, self.plan.heads.num_kv_heads, config.block_size, model.head_dim
        )
        dtype = pool_dtype(self.plan.kv_dtype, self._platform)
        return [self._abstract(shape, dtype, self._pool_sharding)] * model.num_layers

    def _abstract_hidden(self) -> jax.ShapeDtypeStruct:
        dtype = self.model.activation_dtype
        return self._abstract((self.config.max_num_seqs, self.model.config.hidden_size), dtype)

    def _abstract_slots(self) -> jax.ShapeDtypeStruct:
        return self._abstract((self.config.max_num_seqs + 1,), jnp.int32)

    def _lower_forward(self, key: ProgramKey) -> jax.stages.Lowered:
        layout = self._layout(key)
        function = functools.partial(forward, self.model, self.plan, layout, bool(key.variant))
        pools = self._abstract_pools()
        shardings = [self._pool_sharding] * len(pools)
        whole = self._replicated
        jitted = jax.jit(
            function, donate_argnums=(1, 2), out_shardings=(whole, whole, shardings, shardings)
        )
        packed = self._abstract((layout.size,), jnp.int32)
        return jitted.lower(self.model.abstract, pools, pools, self._abstract_slots(), packed)

    def _lower_logits(self, key: ProgramKey) -> jax.stages.Lowered:
        head = {name: self.model.abstract[name] for name in self.model.head_names}
        function = functools.partial(head_logits, self.model, key.size)
        jitted = jax.jit(function, out_shardings=self._replicated)
        return jitted.lower(head, self._abstract_hidden())

    def _lower_sample(self, key: ProgramKey) -> jax.stages.Lowered:
        config = self.config
        function = functools.partial(sample_rows, key.size, config.max_num_seqs, key.variant)
        jitted = jax.jit(function, donate_argnums=2, out_shardings=self._replicated)
        logits = self._abstract((key.size, self.model.config.vocab_size), jnp.float32)
        size = BatchLayout(config.max_num_seqs, 0, 0, self._table_width).sampling_size
        sampling = self._abstract((size,), jnp.int32)
        return jitted.lower(logits, sampling, self._abstract_slots())
