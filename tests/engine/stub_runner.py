"""A device made of Python: a pool of token ids, and a next token that depends on all of them.

It reads a request's tokens through its block table, as attention would, so a block that is lost,
shared wrongly or overwritten changes or breaks the output.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

from jaxllm.engine.core import EngineCore
from jaxllm.engine.request import Request
from jaxllm.engine.scheduler import SchedulerConfig
from jaxllm.engine.step_plan import StepPlan, StepResult
from jaxllm.sampling_params import SamplingParams

VOCAB = 50
EOS = 7


def next_token(tokens: list[int]) -> int:
    """A pure function of all tokens before."""
    digest = hashlib.sha256(np.asarray(tokens, "<i4").tobytes()).digest()
    return int.from_bytes(digest[:4], "little") % VOCAB


def reference_output(prompt: list[int], max_total: int, eos: frozenset[int]) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < max_total:
        tokens.append(next_token(tokens))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


@dataclass
class StubStep:
    token_ids: np.ndarray

    def result(self) -> StepResult:
        return StepResult(self.token_ids)


class StubRunner:
    def __init__(self, num_blocks: int, block_size: int, num_slots: int):
        self.block_size = block_size
        self.pool = np.full((num_blocks, block_size), -1)
        self.last_tokens = [-1] * num_slots
        self.plans: list[StepPlan] = []
        self.fail_next = False

    def dispatch(self, plan: StepPlan) -> StubStep:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("device lost")
        self.plans.append(plan)
        entries = list(
            zip(
                plan.requests, plan.starts, plan.counts, plan.samples, plan.from_device, strict=True
            )
        )
        # All writes come before any read, as in a layer.
        for request, start, count, _, from_device in entries:
            tokens = (
                [self.last_tokens[request.slot]]
                if from_device
                else request.token_ids[start : start + count]
            )
            assert len(tokens) == count
            for position, token in enumerate(tokens, start):
                block = request.block_ids[position // self.block_size]
                assert block != 0
                self.pool[block, position % self.block_size] = token
        sampled = []
        for request, start, count, samples, _ in entries:
            if samples:
                end = start + count
                rows = self.pool[request.block_ids].reshape(-1)[:end]
                sampled.append(next_token(rows.tolist()))
                self.last_tokens[request.slot] = sampled[-1]
        return StubStep(np.asarray(sampled, np.int32))

    def reset(self) -> None:
        self.pool[:] = -1


def make_core(
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    budget: int = 32,
    max_model_len: int = 64,
    async_scheduling: bool = False,
    caching: bool = True,
    **options,
) -> EngineCore:
    config = SchedulerConfig(max_num_seqs, budget, max_model_len, block_size, **options)
    return EngineCore(
        config,
        StubRunner(num_blocks, block_size, max_num_seqs),
        num_blocks=num_blocks,
        enable_prefix_caching=caching,
        async_scheduling=async_scheduling,
    )


def make_request(
    request_id: str,
    prompt: list[int],
    max_tokens: int = 8,
    core: EngineCore | None = None,
    eos: frozenset[int] = frozenset(),
    **options,
) -> Request:
    params = SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        stop_token_ids=options.pop("stop_token_ids", ()),
        ignore_eos=options.pop("ignore_eos", False),
    )
    limit = core.config.max_model_len if core else 10**6
    return Request(request_id, prompt, params, max_model_len=limit, eos_token_ids=eos, **options)


def run(core: EngineCore, limit: int = 10_000) -> dict[str, list[int]]:
    """Steps until nothing is left; the outputs by request id."""
    outputs: dict[str, list[int]] = {}
    for _ in range(limit):
        if not core.has_unfinished:
            core.drain()
            return outputs
        for output in core.step():
            outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
    raise AssertionError(f"unfinished after {limit} steps: {core.scheduler.requests}")
