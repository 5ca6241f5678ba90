"""Programs: every function a step can call, by bucket, compiled ahead of time."""

import dataclasses
import functools
import hashlib
import logging
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxllm.execution.batch import GREEDY, NEEDS, BatchLayout
from jaxllm.execution.buckets import coarse_buckets, decode_buckets, find_bucket, token_buckets
from jaxllm.execution.compilation import compile_all
from jaxllm.execution.fingerprint import without_addresses
from jaxllm.execution.logit_edits import (
    ENTRY_FIELDS,
    ROW_FIELDS,
    apply_entries,
    apply_mask,
    entry_buckets,
    mask_words,
)
from jaxllm.execution.mesh import TENSOR_AXIS, replicated
from jaxllm.execution.parameters import FunctionalModel
from jaxllm.execution.program import Program
from jaxllm.execution.program_store import ProgramStore
from jaxllm.execution.step import (
    AttentionPlan,
    forward,
    head_logits,
    sample_rows,
    sampled_logprobs,
)
from jaxllm.models.layers import take_rows
from pallas_kernels.paged_attention.pool import pool_dtype, pool_shape, pool_spec

logger = logging.getLogger(__name__)

# Implementations whose one program serves decode and mixed batches alike.
RAGGED_IMPLEMENTATIONS = ("cpu",)


@dataclasses.dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Limits that fix the shapes of programs and pools.

    Attributes:
      num_blocks: P, the null block included.
      num_top: how many of the most probable tokens come with a position's log probability.
      all_logprobs: whether a step may be asked for more, which takes the whole vocabulary.
      processed_logprobs: return those of the distribution sampled from, not of the raw logits.
      enforce_eager: compile a bucket when it is first needed, not at start.
      fixed_shapes: one bucket of tokens and one of rows, for programs whose results depend on the
        number of either.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    num_top: int = 20
    all_logprobs: bool = False
    processed_logprobs: bool = False
    enforce_eager: bool = False
    fixed_shapes: bool = False
    progress: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramKey:
    """Which program.

    Attributes:
      kind: "forward", "logits", "mask", "edit", "sample", "logprobs" or "rows".
      size: tokens of forward and rows programs, sampling rows of the others.
      variant: forward: decode (1) or mixed (0); sample: the need; edit: number of entries;
        logprobs: the whole vocabulary (1) or the most probable (0).
    """

    kind: str
    size: int
    variant: int = 0


class Programs:
    """Executables by key. A key that the warm-up left out is compiled when it is first asked for.

    Args:
      model, plan, config: what fixes the shapes.
      store: where executables are kept from one start to the next; None keeps none.
    """

    def __init__(
        self,
        model: FunctionalModel,
        plan: AttentionPlan,
        config: RunnerConfig,
        store: ProgramStore | None = None,
    ):
        self.model = model
        self.plan = plan
        self.config = config
        self._store = store
        self.mesh: Mesh = plan.mesh
        self.replicated = replicated(self.mesh)
        self.pool_sharding = NamedSharding(self.mesh, pool_spec(TENSOR_AXIS))
        self.table_width = -(-config.max_model_len // config.block_size)
        self.separate_decode = plan.impl not in RAGGED_IMPLEMENTATIONS and not config.fixed_shapes
        self._row_buckets = decode_buckets(config.max_num_seqs)
        self._token_buckets = token_buckets(config.max_num_batched_tokens)
        if config.fixed_shapes:
            self._row_buckets = [config.max_num_seqs]
            self._token_buckets = [config.max_num_batched_tokens]
        self._coarse_row_buckets = coarse_buckets(self._row_buckets)
        if not self.separate_decode and not config.fixed_shapes:
            small = [b for b in self._row_buckets if b < config.max_num_batched_tokens]
            self._token_buckets = sorted({*self._token_buckets, *small})
        self._compiled: dict[ProgramKey, jax.stages.Compiled] = {}

    def __getitem__(self, key: ProgramKey) -> jax.stages.Compiled:
        program = self._compiled.get(key)
        if program is None:
            program = self._compiled[key] = self.compile(key)
        return program

    def items(self) -> list[tuple[ProgramKey, jax.stages.Compiled]]:
        """What is compiled so far."""
        return list(self._compiled.items())

    def warm_up(self) -> None:
        """Compiles everything, in threads."""
        jobs = ((key, functools.partial(self.compile, key)) for key in self.keys())
        self._compiled = compile_all(jobs, progress=self.config.progress)

    def keys(self) -> list[ProgramKey]:
        """Every program a step can need, the dearest to compile first."""
        keys = [ProgramKey("forward", size) for size in reversed(self._token_buckets)]
        if self.separate_decode:
            keys += [ProgramKey("forward", size, 1) for size in reversed(self._row_buckets)]
        for need in reversed(range(len(NEEDS))):
            rows = self._row_buckets if need == GREEDY else self._coarse_row_buckets
            keys += [ProgramKey("sample", size, need) for size in reversed(rows)]
        for size in self._coarse_row_buckets:
            keys += [ProgramKey("logprobs", size, variant) for variant in self.logprob_variants]
            keys.append(ProgramKey("mask", size))
            entries = entry_buckets(size, self.config.max_model_len)
            keys += [ProgramKey("edit", size, count) for count in entries]
        keys += [ProgramKey("logits", size) for size in reversed(self._row_buckets)]
        sizes = {key.size for key in keys if key.kind == "forward"}
        keys += [ProgramKey("rows", size) for size in sorted(sizes)]
        return keys

    @property
    def logprob_variants(self) -> tuple[int, ...]:
        """Variants of the logprobs programs that requests may need."""
        return (0, 1) if self.config.all_logprobs else (0,)

    @property
    def num_top(self) -> int:
        """How many of the most probable tokens come with a position's log probability."""
        return min(self.config.num_top, self.model.config.vocab_size)

    def logprob_variant(self, wanted: Iterable[int]) -> int:
        """That of the logprobs program for rows which want so many tokens each (-1: all)."""
        return int(any(not 0 <= count <= self.num_top for count in wanted))

    def compile(self, key: ProgramKey) -> jax.stages.Compiled:
        """Compiles one program from abstract shapes, or finds it in the store."""
        program: Program = getattr(self, f"_define_{key.kind}")(key)
        if self._store is None:
            compiled = program.lower().compile()
        else:
            compiled = self._store.compile(f"{key} of {self._description}", program)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("program %s: %s", key, compiled.memory_analysis())
        return compiled

    @functools.cached_property
    def _description(self) -> str:
        """A hash of all that the programs' functions hold besides their arguments."""
        shaping = dataclasses.replace(
            self.config, progress=False, enforce_eager=False, all_logprobs=False
        )
        parts = (self.model, self.plan, shaping)
        return hashlib.sha256(without_addresses(repr(parts)).encode()).hexdigest()

    def forward_key(self, num_tokens: int, is_decode: bool) -> ProgramKey:
        """The forward program for a step of so many tokens."""
        decode = self.separate_decode and is_decode
        buckets = self._row_buckets if decode else self._token_buckets
        return ProgramKey("forward", find_bucket(buckets, num_tokens), int(decode))

    def row_bucket(self, num_rows: int, greedy_only: bool) -> int:
        """Padded number of sampling rows; batches with only greedy requests pad less."""
        buckets = self._row_buckets if greedy_only else self._coarse_row_buckets
        return find_bucket(buckets, num_rows)

    def layout(self, key: ProgramKey) -> BatchLayout:
        """Layout of the packed buffer that a forward program takes."""
        requests = min(key.size, self.config.max_num_seqs)
        return BatchLayout(self.config.max_num_seqs, key.size, requests, self.table_width)

    @property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    def _abstract(self, shape: tuple[int, ...], dtype: Any, sharding=None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding or self.replicated)

    def _ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self._abstract(shape, jnp.int32)

    def _floats(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self._abstract(shape, jnp.float32)

    def _logits(self, rows: int) -> jax.ShapeDtypeStruct:
        return self._floats(rows, self.model.config.vocab_size)

    def _hidden(self, rows: int) -> jax.ShapeDtypeStruct:
        return self._abstract((rows, self.model.config.hidden_size), self.model.activation_dtype)

    @property
    def _sampling(self) -> jax.ShapeDtypeStruct:
        return self._ints(BatchLayout(self.config.max_num_seqs, 0, 0, 0).sampling_size)

    @property
    def _slots(self) -> jax.ShapeDtypeStruct:
        return self._ints(self.config.max_num_seqs + 1)

    def _program(self, function: Any, *arguments: Any, donated: tuple[int, ...] = ()) -> Program:
        return Program(function, arguments, self.replicated, donated)

    def _define_forward(self, key: ProgramKey) -> Program:
        layout, config, model = self.layout(key), self.config, self.model.config
        shape = pool_shape(
            config.num_blocks, self.plan.heads.num_kv_heads, config.block_size, model.head_dim
        )
        dtype = pool_dtype(self.plan.kv_dtype, self.platform)
        pools = [self._abstract(shape, dtype, self.pool_sharding)] * model.num_layers
        shardings = [self.pool_sharding] * model.num_layers
        whole = self.replicated
        packed = self._ints(layout.size)
        return Program(
            functools.partial(forward, self.model, self.plan, layout, bool(key.variant)),
            (self.model.abstract, pools, pools, self._slots, packed),
            out_shardings=(whole, whole, whole, shardings, shardings),
            donated=(1, 2),
        )

    def _define_logits(self, key: ProgramKey) -> Program:
        head = {name: self.model.abstract[name] for name in self.model.head_names}
        function = functools.partial(head_logits, self.model, key.size)
        return self._program(function, head, self._hidden(self.config.max_num_seqs))

    def _define_mask(self, key: ProgramKey) -> Program:
        words = mask_words(self.model.config.vocab_size)
        return self._program(apply_mask, self._logits(key.size), self._ints(key.size, words))

    def _define_edit(self, key: ProgramKey) -> Program:
        packed = self._ints(ENTRY_FIELDS * key.variant + ROW_FIELDS * key.size)
        function = functools.partial(apply_entries, key.variant)
        return self._program(function, self._logits(key.size), packed)

    def _define_sample(self, key: ProgramKey) -> Program:
        function = functools.partial(sample_rows, key.size, self.config.max_num_seqs, key.variant)
        return self._program(
            function, self._logits(key.size), self._sampling, self._slots, donated=(2,)
        )

    def _define_logprobs(self, key: ProgramKey) -> Program:
        config = self.config
        num_top = None if key.variant else self.num_top
        function = functools.partial(
            sampled_logprobs, num_top, config.processed_logprobs, config.max_num_seqs
        )
        rows = key.size
        return self._program(
            function, self._logits(rows), self._ints(rows), self._floats(rows), self._sampling
        )

    def _define_rows(self, key: ProgramKey) -> Program:
        rows = self._ints(self.config.max_num_seqs)
        return self._program(take_rows, self._hidden(key.size), rows)
