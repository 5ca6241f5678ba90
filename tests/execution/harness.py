"""Runs hand-made plans through the real forward program and shows the logits of every token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.engine.request import Request
from jaxllm.engine.step_plan import StepPlan
from jaxllm.execution.batch import BatchLayout, BatchPacker
from jaxllm.execution.mesh import HeadLayout
from jaxllm.execution.step import AttentionPlan, forward
from jaxllm.sampling_params import SamplingParams
from pallas_kernels.paged_attention.pool import allocate_pool
from tests.models.families import Recorded

SLOTS = 64
BLOCK = 8
WIDTH = 12


class Harness:
    """Four sequences at most, each with its own shuffled blocks."""

    def __init__(self, recorded: Recorded, impl: str, kv_dtype=jnp.float32):
        self.recorded = recorded
        config, mesh = recorded.model.config, next(iter(recorded.params.values())).sharding.mesh
        self.plan = AttentionPlan(impl, HeadLayout.of(config, mesh.size), kv_dtype, mesh)
        num_blocks = 4 * WIDTH + 1
        pools = [
            allocate_pool(
                num_blocks, self.plan.heads.num_kv_heads, BLOCK, config.head_dim, kv_dtype
            )
            for _ in range(config.num_layers)
        ]
        self.k_pools, self.v_pools = [k for k, _ in pools], [v for _, v in pools]
        self.packer = BatchPacker(SLOTS, WIDTH, BLOCK, config.vocab_size)
        blocks = np.random.default_rng(0).permutation(np.arange(1, num_blocks)).reshape(4, WIDTH)
        self.requests = []
        for slot in range(4):
            ids = recorded.sequences[slot % len(recorded.sequences)][0]
            request = Request(
                str(slot), ids.tolist(), SamplingParams(temperature=0), max_model_len=WIDTH * BLOCK
            )
            request.slot = slot
            request.block_ids = blocks[slot].tolist()
            self.requests.append(request)
        self.admitted: set[int] = set()
        self.programs = {decode: self.program(decode) for decode in (False, True)}

    def program(self, decode: bool):
        layout = BatchLayout(SLOTS, 4, 4, WIDTH) if decode else BatchLayout(SLOTS, 64, 8, WIDTH)
        function = functools.partial(forward, self.recorded.model, self.plan, layout, decode)
        return layout, jax.jit(function, donate_argnums=(1, 2))

    def run(self, chunks: list[tuple[int, int, int]], decode: bool = False) -> list[np.ndarray]:
        """Runs (sequence, start, count) chunks in one step; logits [count, V] of each."""
        hidden, rows = self.hidden(chunks, decode, keep_all=True)
        ends = np.cumsum([count for *_, count in chunks])
        np.testing.assert_array_equal(rows, hidden[ends - 1])
        logits = np.asarray(self.recorded.model.bind(self.recorded.params).logits(hidden))
        return [logits[end - count : end] for end, (*_, count) in zip(ends, chunks, strict=True)]

    def hidden(
        self, chunks: list[tuple[int, int, int]], decode: bool = False, keep_all: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Kept hidden states [T, hidden] of such a step, and those of each chunk's last token."""
        plan = StepPlan()
        for index, start, count in chunks:
            request = self.requests[index]
            if index not in self.admitted:
                self.admitted.add(index)
                plan.admitted.append(request)
            plan.add(request, start, count, True, False)
        layout, program = self.programs[decode]
        packed, _, _ = self.packer.pack(plan, layout, keep_all)
        last_tokens = jnp.zeros(SLOTS + 1, jnp.int32)
        hidden, rows, _, self.k_pools, self.v_pools = program(
            self.recorded.params, self.k_pools, self.v_pools, last_tokens, jnp.asarray(packed)
        )
        return np.asarray(hidden), np.asarray(rows)[: len(chunks)]
