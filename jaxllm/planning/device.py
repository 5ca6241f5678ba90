"""What stands in for the device and for the tokens in a simulation."""

import dataclasses

import numpy as np

from jaxllm.engine.block_pool import BlockPool
from jaxllm.engine.request import Request
from jaxllm.engine.step_plan import StepPlan, StepResult
from jaxllm.planning.step_time import StepTimeModel
from jaxllm.sampling_params import SamplingParams


class SimulatedRequest(Request):
    """A request of the trace; its tokens are zeros, and its block hashes are given beforehand.

    Attributes:
      index: its place in the trace.
      last_token_time: when its newest token came; meaningless before the first.
    """

    __slots__ = ("index", "last_token_time")

    def __init__(
        self,
        index: int,
        prompt_tokens: int,
        params: SamplingParams,
        max_model_len: int,
        block_hashes: list[bytes],
    ):
        super().__init__(
            str(index), [0] * prompt_tokens, params, max_model_len=max_model_len, arrival_time=0.0
        )
        self.index = index
        self.block_hashes = block_hashes
        self.last_token_time = 0.0


@dataclasses.dataclass(slots=True)
class _PendingStep:
    runner: "SimulatedRunner"
    end: float
    num_sampled: int

    def result(self) -> StepResult:
        self.runner.now = max(self.runner.now, self.end)
        return StepResult(np.zeros(self.num_sampled, np.int32))


class SimulatedRunner:
    """A device that only takes time.

    Attributes:
      pool: the scheduler's, to see what a step holds.
      now: the host's clock.
      free_at: when the device has done all that was dispatched.
      num_steps: dispatched in all.
      last_seconds, last_was_decode, last_running, last_used: of the step dispatched last: its time,
        whether it had no prompt tokens, its requests, and the blocks in use.
    """

    def __init__(self, model: StepTimeModel):
        self.model = model
        self.pool = BlockPool(2)
        self.now = 0.0
        self.free_at = 0.0
        self.num_steps = 0
        self.last_seconds = 0.0
        self.last_was_decode = False
        self.last_running = 0
        self.last_used = 0

    def dispatch(self, plan: StepPlan) -> _PendingStep:
        """Books the step's time on the device."""
        features = plan_features(plan)
        seconds = self.model.seconds(*features)
        self.free_at = max(self.free_at, self.now) + seconds
        self.num_steps += 1
        self.last_seconds = seconds
        self.last_was_decode = features[0] == 0
        self.last_running = len(plan.requests)
        self.last_used = self.pool.num_used
        return _PendingStep(self, self.free_at, plan.num_sampled)

    def reset(self) -> None:
        """Nothing is kept on the device."""


def plan_features(plan: StepPlan) -> tuple[int, int, int, int]:
    """(prefill tokens, decode requests, context tokens, prefill pairs) of a step."""
    if plan.is_decode:
        num = len(plan.requests)
        return 0, num, sum(plan.starts) + num, 0
    prefill = decode = context = pairs = 0
    for start, count in zip(plan.starts, plan.counts, strict=True):
        if count == 1:
            decode += 1
            context += start + 1
        else:
            prefill += count
            pairs += count * start + count * (count + 1) // 2
    return prefill, decode, context, pairs
