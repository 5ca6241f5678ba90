"""Runner: the device side of a step. Holds parameters, pools and the compiled programs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.engine.step_plan import LogprobRows, StepPlan, StepResult
from jaxllm.execution.batch import GREEDY, BatchPacker
from jaxllm.execution.logit_edits import pack_edits
from jaxllm.execution.parameters import FunctionalModel, Params
from jaxllm.execution.program_store import ProgramStore
from jaxllm.execution.programs import ProgramKey, Programs, RunnerConfig
from jaxllm.execution.step import AttentionPlan, Pools
from pallas_kernels.paged_attention.pool import allocate_pool


@dataclasses.dataclass(slots=True)
class DeviceLogprobs:
    """Log probabilities on their way to the host: as token_logprobs gives them, or with the whole
    vocabulary in place of values and ids; of `count` rows, and padding."""

    arrays: tuple[jax.Array, ...]
    count: int

    def rows(self) -> LogprobRows:
        """Waits for them."""
        logprobs, ranks, top, *ids = (np.asarray(array)[: self.count] for array in self.arrays)
        return LogprobRows(logprobs, ranks, top, ids[0] if ids else None)


@dataclasses.dataclass(slots=True)
class DeviceStep:
    """A dispatched step: its results are on their way to the host.

    Attributes:
      prompt_logprobs: with the index of the plan's request, a group of positions each.
    """

    token_ids: jax.Array | None
    num_sampled: int
    logprobs: DeviceLogprobs | None
    prompt_logprobs: list[tuple[int, DeviceLogprobs | LogprobRows]]

    def result(self) -> StepResult:
        token_ids = np.zeros(0, np.int32)
        if self.token_ids is not None:
            token_ids = np.asarray(self.token_ids)[: self.num_sampled]
        logprobs = None if self.logprobs is None else self.logprobs.rows()
        parts: dict[int, list[LogprobRows]] = {}
        for index, part in self.prompt_logprobs:
            rows = part.rows() if isinstance(part, DeviceLogprobs) else part
            parts.setdefault(index, []).append(rows)
        joined = {index: _concatenate(groups) for index, groups in parts.items()}
        return StepResult(token_ids, logprobs, joined)


class Runner:
    """Packs plans, runs the programs of their buckets, and keeps the pools."""

    def __init__(
        self,
        model: FunctionalModel,
        params: Params,
        plan: AttentionPlan,
        config: RunnerConfig,
        store: ProgramStore | None = None,
    ):
        self.model = model
        self.config = config
        self.programs = Programs(model, plan, config, store)
        self._packer = BatchPacker(
            config.max_num_seqs,
            self.programs.table_width,
            config.block_size,
            model.config.vocab_size,
        )
        if not config.enforce_eager:
            self.programs.warm_up()
        self.params: Params = {}
        self._head_params: Params = {}
        self.set_params(params)
        self._k_pools: Pools = []
        self._v_pools: Pools = []
        self._last_tokens: jax.Array
        self.allocate_pools()

    def dispatch(self, plan: StepPlan) -> DeviceStep:
        """Starts the programs of a step; does not wait for them."""
        key = self.programs.forward_key(plan.num_tokens, plan.is_decode)
        scores = any(request.params.prompt_logprobs is not None for request in plan.requests)
        packed, num_sampled, need = self._packer.pack(
            plan, self.programs.layout(key), keep_all=scores
        )
        hidden, rows, sampling, self._k_pools, self._v_pools = self.programs[key](
            self.params, self._k_pools, self._v_pools, self._last_tokens, self._put(packed)
        )
        prompt_logprobs = self._prompt_logprobs(plan, key.size, hidden, sampling)
        if not num_sampled:
            return DeviceStep(None, 0, None, prompt_logprobs)
        token_ids, logprobs = self._sample(plan, rows, sampling, num_sampled, need)
        return DeviceStep(token_ids, num_sampled, logprobs, prompt_logprobs)

    def hidden_states(self, plan: StepPlan, key: ProgramKey) -> np.ndarray:
        """Runs a plan through one forward program and samples nothing: [T, hidden] with padding."""
        packed, _, _ = self._packer.pack(plan, self.programs.layout(key), keep_all=True)
        hidden, _, _, self._k_pools, self._v_pools = self.programs[key](
            self.params, self._k_pools, self._v_pools, self._last_tokens, self._put(packed)
        )
        return np.asarray(hidden)

    def reset(self) -> None:
        """Forgets the slots, and makes the pools anew if a failed step consumed them."""
        self._packer.reset()
        held = [*self._k_pools, *self._v_pools, self._last_tokens]
        if self.has_pools and any(array.is_deleted() for array in held):
            self.allocate_pools()

    def set_params(self, params: Params) -> None:
        """Takes these arrays for every step from now on; {} lets go of those it has.

        They must be what `model.abstract` says: the programs accept nothing else.
        """
        self.params = params
        self._head_params = {name: params[name] for name in self.model.head_names if params}

    @property
    def has_pools(self) -> bool:
        """False between `free_pools` and `allocate_pools`."""
        return bool(self._k_pools)

    def free_pools(self) -> None:
        """Gives the pools' memory back; no step may run before `allocate_pools`."""
        for array in (*self._k_pools, *self._v_pools):
            array.delete()
        self._k_pools, self._v_pools = [], []

    def _sample(
        self, plan: StepPlan, hidden: jax.Array, sampling: jax.Array, num_sampled: int, need: int
    ) -> tuple[jax.Array, DeviceLogprobs | None]:
        """Logits, edits, draw and log probabilities of the sampling rows."""
        requests = [r for r, samples in zip(plan.requests, plan.samples, strict=True) if samples]
        edits = self._packer.edits_of(requests)
        wanted = [r.params.logprobs for r in requests if r.params.logprobs is not None]
        edited = any(edit is not None for edit in edits)
        plain = need == GREEDY and not wanted and not edited
        num_rows = self.programs.row_bucket(num_sampled, greedy_only=plain)
        logits = self._run("logits", num_rows, 0, self._head_params, hidden)
        # Edits make new arrays; what nobody asks for should not stay beside them.
        raw = logits if wanted and not self.config.processed_logprobs else None
        if edited:
            vocab_size = self.model.config.vocab_size
            packed = pack_edits(edits, num_rows, self.config.max_model_len, vocab_size)
            if packed.mask is not None:
                logits = self._run("mask", num_rows, 0, logits, self._put(packed.mask))
            if packed.entries is not None:
                entries = self._put(packed.entries)
                logits = self._run("edit", num_rows, packed.num_entries, logits, entries)
        token_ids, floors, self._last_tokens = self._run(
            "sample", num_rows, need, logits, sampling, self._last_tokens
        )
        token_ids.copy_to_host_async()
        if not wanted:
            return token_ids, None
        if raw is not None:
            logits = raw
        variant = self.programs.logprob_variant(wanted)
        arrays = self._run("logprobs", num_rows, variant, logits, token_ids, floors, sampling)
        return token_ids, DeviceLogprobs(arrays, num_sampled)

    def _prompt_logprobs(
        self, plan: StepPlan, num_tokens: int, hidden: jax.Array, sampling: jax.Array
    ) -> list[tuple[int, DeviceLogprobs | LogprobRows]]:
        """Log probabilities of the prompt tokens that follow this step's tokens, raw, a group of
        max_num_seqs positions at a time."""
        results = []
        group = self.config.max_num_seqs
        offset = 0
        for index, request in enumerate(plan.requests):
            start, count = plan.starts[index], plan.counts[index]
            wanted = request.params.prompt_logprobs
            if wanted is not None:
                variant = self.programs.logprob_variant([wanted])
                end = min(start + count, request.num_prompt_tokens - 1)
                for first in range(start, end, group):
                    last = min(first + group, end)
                    states = self._rows_of(hidden, num_tokens, offset + first - start, last - first)
                    targets = request.token_ids[first + 1 : last + 1]
                    results.append((index, self._scores(states, targets, variant, sampling)))
            offset += count
        return results

    def _rows_of(self, hidden: jax.Array, num_tokens: int, first: int, count: int) -> jax.Array:
        """Rows first to first + count of the hidden states of a step, padded to max_num_seqs."""
        rows = np.zeros(self.config.max_num_seqs, np.int32)
        rows[:count] = np.arange(first, first + count)
        return self._run("rows", num_tokens, 0, hidden, self._put(rows))

    def _scores(
        self, hidden: jax.Array, token_ids: list[int], variant: int, sampling: jax.Array
    ) -> DeviceLogprobs | LogprobRows:
        """Log probabilities of tokens after hidden states [S, hidden].

        Those of the whole vocabulary are on the host when this returns: a device may have no room
        for all positions of a prompt.
        """
        group = self.config.max_num_seqs
        targets = np.zeros(group, np.int32)
        targets[: len(token_ids)] = token_ids
        logits = self._run("logits", group, 0, self._head_params, hidden)
        everything = jnp.full(group, -jnp.inf, device=self.programs.replicated)
        arrays = self._run(
            "logprobs", group, variant, logits, self._put(targets), everything, sampling
        )
        found = DeviceLogprobs(arrays, len(token_ids))
        return found.rows() if variant else found

    def _run(self, kind: str, size: int, variant: int, *arguments: Any) -> Any:
        return self.programs[ProgramKey(kind, size, variant)](*arguments)

    def _put(self, array: np.ndarray) -> jax.Array:
        return jax.device_put(array, self.programs.replicated)

    def allocate_pools(self) -> None:
        """Makes zeroed pools, of the shapes the programs were compiled for."""
        config, model, programs = self.config, self.model.config, self.programs
        pools = [
            allocate_pool(
                config.num_blocks,
                programs.plan.heads.num_kv_heads,
                config.block_size,
                model.head_dim,
                programs.plan.kv_dtype,
                platform=programs.platform,
                sharding=programs.pool_sharding,
            )
            for _ in range(model.num_layers)
        ]
        self._k_pools = [k for k, _ in pools]
        self._v_pools = [v for _, v in pools]
        slots = config.max_num_seqs + 1
        self._last_tokens = jnp.zeros(slots, jnp.int32, device=programs.replicated)


def _concatenate(parts: list[LogprobRows]) -> LogprobRows:
    if len(parts) == 1:
        return parts[0]
    ids = [part.top_ids for part in parts if part.top_ids is not None]
    return LogprobRows(
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.ranks for part in parts]),
        np.concatenate([part.top_logprobs for part in parts]),
        np.concatenate(ids) if ids else None,
    )
