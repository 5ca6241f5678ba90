"""What travels between the scheduler and the device side, once per step."""

import dataclasses

import numpy as np

from jaxllm.engine.request import FinishReason, Request, TokenLogprobs


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
class LogprobRows:
    """Log probabilities of n positions, float32.

    Attributes:
      logprobs, ranks: of the token at each position, [n].
      top_logprobs: the K most probable in falling order [n, K], or all by id [n, V].
      top_ids: their ids int32 [n, K], None where top_logprobs is by id.
    """

    logprobs: np.ndarray
    ranks: np.ndarray
    top_logprobs: np.ndarray
    top_ids: np.ndarray | None

    def row(self, index: int, token_id: int, count: int) -> TokenLogprobs:
        """One position, with the `count` most probable tokens, or all V of them (-1)."""
        values = self.top_logprobs[index]
        ids: np.ndarray | None = None
        if self.top_ids is not None:
            ids = self.top_ids[index, :count]
            values = values[:count]
        elif 0 <= count < len(values):
            # The step returned the whole vocabulary, for this or for another of its requests.
            ids = _most_probable(values, count)
            values = values[ids]
        return TokenLogprobs(
            token_id, float(self.logprobs[index]), int(self.ranks[index]), ids, values
        )


def _most_probable(values: np.ndarray, count: int) -> np.ndarray:
    """Ids of the `count` largest of values [V] in falling order; equal ones by id."""
    if count == 0:
        return np.zeros(0, np.int32)
    least = np.partition(values, len(values) - count)[len(values) - count]
    ids = np.flatnonzero(values >= least).astype(np.int32)
    return ids[np.argsort(-values[ids], kind="stable")][:count]


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled tokens of a step.

    Attributes:
      token_ids: int32 [number of sampling entries], in the plan's order.
      logprobs: of the sampled tokens, where a request asked for them.
      prompt_logprobs: by index into the plan's requests: those of the prompt tokens that follow the
        entry's tokens, in order.
    """

    token_ids: np.ndarray
    logprobs: LogprobRows | None = None
    prompt_logprobs: dict[int, LogprobRows] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class EngineOutput:
    """News of one request after a step."""

    request: Request
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id
