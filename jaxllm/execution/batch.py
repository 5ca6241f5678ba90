"""The one packed int32 buffer a step sends to the device, and its packing on the host.

The sampling part comes first and has one shape for all buckets, so that the sampler's programs
do not depend on the number of tokens. Floats travel as their bits.
"""

import dataclasses
from typing import Any

import numpy as np

from jaxllm.engine.request import Request
from jaxllm.engine.step_plan import StepPlan
from jaxllm.execution.logit_edits import RowEdits, needs_edits
from jaxllm.execution.noise import uniform

# Sampler programs by need, in rising order: a batch takes the largest need of its requests.
GREEDY, RANDOM, TRUNCATED = range(3)
NEEDS = ("greedy", "random", "truncated")


@dataclasses.dataclass(slots=True)
class SamplingFields:
    """Per sampling row, int32 [S] each (S = max_num_seqs); floats as bits.

    Attributes:
      rows: place of the row's hidden state among those that are kept; T and above for rows without
        a request.
      slots: the request's slot; rows without a request have slot S, a spare one.
      uniform: the noise of the draw, in [0, 1).
    """

    rows: Any
    slots: Any
    uniform: Any
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any


NUM_SAMPLING_FIELDS = len(dataclasses.fields(SamplingFields))
# Fields that stay as they are while a request keeps its slot: temperature onward.
FIRST_SLOT_FIELD = 3


@dataclasses.dataclass(slots=True)
class BatchFields:
    """The step's tokens and requests, int32.

    Attributes:
      token_ids: [T]; -1 - s stands for the token last sampled into slot s, V for padding.
      positions: [T]
      write_slots: [T] place in the pool, block * block_size + offset; 0 for padding.
      kept: [T] the tokens whose hidden states are wanted; T past the last of them.
      query_starts: [R + 1]
      context_lens: [R]
      block_tables: [R, M]
    """

    token_ids: Any
    positions: Any
    write_slots: Any
    kept: Any
    query_starts: Any
    context_lens: Any
    block_tables: Any


@dataclasses.dataclass(frozen=True, slots=True)
class BatchLayout:
    """Offsets of every field for one bucket.

    Attributes:
      max_num_seqs: S.
      num_tokens: T.
      num_requests: R.
      table_width: M.
    """

    max_num_seqs: int
    num_tokens: int
    num_requests: int
    table_width: int

    @property
    def sampling_size(self) -> int:
        return NUM_SAMPLING_FIELDS * self.max_num_seqs

    @property
    def size(self) -> int:
        """Length of the buffer in int32."""
        tokens, requests = self.num_tokens, self.num_requests
        return self.sampling_size + 4 * tokens + 2 * requests + 1 + requests * self.table_width

    def split(self, packed: Any) -> BatchFields:
        """Views (numpy) or slices (traced) of the batch part of a packed buffer [size]."""
        tokens, requests = self.num_tokens, self.num_requests
        per_token = (tokens,) * 4
        sizes = (*per_token, requests + 1, requests, requests * self.table_width)
        fields = []
        offset = self.sampling_size
        for size in sizes:
            fields.append(packed[offset : offset + size])
            offset += size
        fields[-1] = fields[-1].reshape(requests, self.table_width)
        return BatchFields(*fields)


def split_sampling(sampling: Any, max_num_seqs: int) -> SamplingFields:
    """Views or slices of the sampling part, [NUM_SAMPLING_FIELDS * S]."""
    return SamplingFields(*sampling.reshape(NUM_SAMPLING_FIELDS, max_num_seqs))


class BatchPacker:
    """Packs plans; keeps per slot what does not change from step to step.

    Args:
      max_num_seqs: S, the number of slots.
      table_width: M, blocks of a full-length request.
      block_size: tokens in a block.
      vocab_size: V.
    """

    def __init__(self, max_num_seqs: int, table_width: int, block_size: int, vocab_size: int):
        self.max_num_seqs = max_num_seqs
        self.block_size = block_size
        self._tables = np.zeros((max_num_seqs, table_width), np.int32)
        self._table_lengths = [0] * max_num_seqs
        self._slot_fields = np.zeros(
            (NUM_SAMPLING_FIELDS - FIRST_SLOT_FIELD, max_num_seqs), np.int32
        )
        self._needs = np.zeros(max_num_seqs, np.int8)
        self._seeds = np.zeros(max_num_seqs, np.uint64)
        self._vocab_size = vocab_size
        self._edits: list[RowEdits | None] = [None] * max_num_seqs

    def pack(
        self, plan: StepPlan, layout: BatchLayout, keep_all: bool = False
    ) -> tuple[np.ndarray, int, int]:
        """The buffer int32 [layout.size], the number of sampling rows, and the sampler's need.

        keep_all: the hidden states of all tokens are wanted, not those of the sampling rows alone.
        """
        for request in plan.admitted:
            # A request may be preempted again before the step that admits it is packed.
            if request.slot >= 0:
                self._set_slot(request)
        packed = np.zeros(layout.size, np.int32)
        fields = layout.split(packed)
        count = len(plan.requests)
        slots = np.fromiter((request.slot for request in plan.requests), np.int32, count)
        self._update_tables(plan)

        counts = np.asarray(plan.counts, np.int32)
        starts = np.asarray(plan.starts, np.int32)
        ends = np.cumsum(counts, dtype=np.int32)
        fields.query_starts[1 : count + 1] = ends
        fields.query_starts[count + 1 :] = ends[-1]
        fields.context_lens[:count] = starts + counts
        np.take(self._tables, slots, axis=0, out=fields.block_tables[:count])

        total = plan.num_tokens
        if plan.is_decode:
            owners = np.arange(count)
            positions = starts
        else:
            owners = np.repeat(np.arange(count), counts)
            positions = np.arange(total, dtype=np.int32) + np.repeat(starts - ends + counts, counts)
        fields.positions[:total] = positions
        blocks = fields.block_tables[owners, positions // self.block_size]
        fields.write_slots[:total] = blocks * self.block_size + positions % self.block_size
        self._fill_token_ids(plan, fields.token_ids, slots, ends)
        fields.token_ids[total:] = self._vocab_size

        samples = np.asarray(plan.samples, bool)
        num_sampled = plan.num_sampled
        sampled_slots = slots[samples]
        sampling = split_sampling(packed[: layout.sampling_size], self.max_num_seqs)
        last_tokens = ends[samples] - 1
        kept = np.arange(total) if keep_all else last_tokens
        fields.kept[:] = layout.num_tokens
        fields.kept[: len(kept)] = kept
        sampling.rows[:] = layout.num_tokens
        sampling.rows[:num_sampled] = last_tokens if keep_all else np.arange(num_sampled)
        sampling.slots[:] = self.max_num_seqs
        sampling.slots[:num_sampled] = sampled_slots
        need = int(self._needs[sampled_slots].max(initial=GREEDY))
        if need != GREEDY:
            noise = uniform(self._seeds[sampled_slots], (starts + counts)[samples])
            sampling.uniform[:num_sampled] = noise.view(np.int32)
        matrix = packed[: layout.sampling_size].reshape(NUM_SAMPLING_FIELDS, self.max_num_seqs)
        matrix[FIRST_SLOT_FIELD:, :num_sampled] = self._slot_fields[:, sampled_slots]
        return packed, num_sampled, need

    def edits_of(self, requests: list[Request]) -> list[RowEdits | None]:
        """The edits of these running requests, None where a request has none."""
        return [self._edits[request.slot] for request in requests]

    def reset(self) -> None:
        self._table_lengths = [0] * self.max_num_seqs

    def _set_slot(self, request: Request) -> None:
        params, slot = request.params, request.slot
        self._seeds[slot] = request.seed & (2**64 - 1)
        floats = np.array([params.temperature, params.top_p, params.min_p], np.float32)
        temperature, top_p, min_p = floats.view(np.int32)
        self._slot_fields[:, slot] = [temperature, params.top_k, top_p, min_p]
        self._needs[slot] = (
            GREEDY if params.is_greedy else TRUNCATED if params.truncates else RANDOM
        )
        self._table_lengths[slot] = 0
        self._edits[slot] = RowEdits(request, self._vocab_size) if needs_edits(request) else None

    def _update_tables(self, plan: StepPlan) -> None:
        for request in plan.requests:
            slot, blocks = request.slot, request.block_ids
            known = self._table_lengths[slot]
            if known != len(blocks):
                self._tables[slot, known : len(blocks)] = blocks[known:]
                self._table_lengths[slot] = len(blocks)

    def _fill_token_ids(
        self, plan: StepPlan, token_ids: np.ndarray, slots: np.ndarray, ends: np.ndarray
    ) -> None:
        from_device = np.asarray(plan.from_device, bool)
        token_ids[ends[from_device] - 1] = -1 - slots[from_device]
        for i in np.flatnonzero(~from_device):
            request, start, count = plan.requests[i], plan.starts[i], plan.counts[i]
            end = int(ends[i])
            token_ids[end - count : end] = request.token_ids[start : start + count]
