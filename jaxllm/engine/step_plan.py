"""What travels between the scheduler and the device side, once per step."""

import dataclasses

import numpy as np

from jaxllm.engine.request import FinishReason, Request


@dataclasses.dataclass(slots=True)
class StepPlan:
    """One step: entry i runs `counts[i]` tokens of `requests[i]` from position `starts[i]` on.

    Attributes:
      samples: entry i reaches the newest token of its request, so a token is sampled for it.
      from_device: entry i runs the one token that was last sampled into its request's slot.
      admitted: requests that got a slot in this step (their device rows must be set).
      num_tokens: sum of counts.
      num_sampled: sum of samples.
    """

    requests: list[Request] = dataclasses.field(default_factory=list)
    starts: list[int] = dataclasses.field(default_factory=list)
    counts: list[int] = dataclasses.field(default_factory=list)
    samples: list[bool] = dataclasses.field(default_factory=list)
    from_device: list[bool] = dataclasses.field(default_factory=list)
    admitted: list[Request] = dataclasses.field(default_factory=list)
    num_preempted: int = 0
    num_tokens: int = 0
    num_sampled: int = 0

    def add(
        self, request: Request, start: int, count: int, samples: bool, from_device: bool
    ) -> None:
        self.requests.append(request)
        self.starts.append(start)
        self.counts.append(count)
        self.samples.append(samples)
        self.from_device.append(from_device)
        self.num_tokens += count
        self.num_sampled += samples

    def remove(self, request: Request) -> bool:
        """Drops the entry of a request preempted after it was planned; whether it sampled."""
        i = self.requests.index(request)
        del self.requests[i], self.starts[i], self.from_device[i]
        count, samples = self.counts.pop(i), self.samples.pop(i)
        self.num_tokens -= count
        self.num_sampled -= samples
        return samples

    @property
    def is_decode(self) -> bool:
        """Every entry runs one token."""
        return self.num_tokens == len(self.requests)


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled tokens of a step.

    Attributes:
      token_ids: int32 [number of sampling entries], in the plan's order.
    """

    token_ids: np.ndarray


@dataclasses.dataclass(slots=True)
class EngineOutput:
    """News of one request after a step."""

    request: Request
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id
