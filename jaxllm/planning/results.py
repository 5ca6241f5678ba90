"""What a simulation found: per request, per replica, and in summary."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxllm.planning.replica import Records
from jaxllm.planning.trace import TraceRequest
from jaxllm.planning.usage import Usage


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of a quantity; nan where there is no value."""

    mean: float
    p50: float
    p90: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: np.ndarray, weights: np.ndarray | None = None) -> "Spread":
        """Of values [n], each counted weights[n] times."""
        if not len(values):
            return cls(*[float("nan")] * 5)
        order = np.argsort(values)
        values = values[order]
        counts = np.ones(len(values)) if weights is None else weights[order].astype(np.float64)
        upto = np.cumsum(counts)
        places = np.searchsorted(upto, np.array([0.5, 0.9, 0.99]) * upto[-1])
        p50, p90, p99 = values[np.minimum(places, len(values) - 1)].tolist()
        mean = float((values * counts).sum() / upto[-1])
        return cls(mean, p50, p90, p99, float(values[-1]))


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """A simulation in numbers. Times in seconds, rates per second of simulated time.

    Attributes:
      duration: from the first arrival to the last token.
      ttft: arrival to first token.
      itl: gap between two tokens of a request.
      e2e: arrival to last token.
      kv_usage: share of the pool in use, mean over the time in steps, and at its peak.
      batch: requests in a step, mean over the time in steps.
      busy: share of the duration in which a replica ran steps.
      prefix_hit_rate: prompt tokens found in the cache over all prompt tokens.
      preemptions: in all, and requests that were preempted at least once.
    """

    num_requests: int
    num_finished: int
    num_refused: int
    duration: float
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    ttft: Spread
    itl: Spread
    e2e: Spread
    kv_usage_mean: float
    kv_usage_peak: float
    batch_mean: float
    busy: float
    prefix_hit_rate: float
    preemptions: int
    preempted_requests: int
    num_steps: int
    num_scheduled_steps: int


@dataclasses.dataclass(frozen=True, slots=True)
class SimulationResult:
    """Everything a simulation leaves.

    Attributes:
      arrival, first_token, finish: float64 [requests], seconds; nan for refused ones.
      prompt_tokens, output_tokens, cached_tokens, preemptions, replica: integers [requests];
        replica is -1 for refused ones.
      num_finishes: int32 [requests], how often each ended.
      usage: of each replica.
      wall_seconds: what the simulation itself took.
    """

    arrival: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    first_token: np.ndarray
    finish: np.ndarray
    cached_tokens: np.ndarray
    preemptions: np.ndarray
    replica: np.ndarray
    num_finishes: np.ndarray
    usage: tuple[Usage, ...]
    wall_seconds: float

    @classmethod
    def of(
        cls,
        trace: Sequence[TraceRequest],
        max_model_len: int,
        records: Records,
        usage: Sequence[Usage],
        wall_seconds: float,
    ) -> "SimulationResult":
        """From what the replicas recorded, by replica in order."""
        count = len(trace)
        return cls(
            arrival=np.fromiter((r.arrival for r in trace), np.float64, count),
            prompt_tokens=np.fromiter((r.prompt_tokens for r in trace), np.int64, count),
            output_tokens=records.output_tokens,
            first_token=records.first_token,
            finish=records.finish,
            cached_tokens=records.cached_tokens,
            preemptions=records.preemptions,
            replica=records.replica,
            num_finishes=records.num_finishes,
            usage=tuple(usage),
            wall_seconds=wall_seconds,
        )

    @property
    def ttft(self) -> np.ndarray:
        """Seconds from arrival to first token, of the finished requests."""
        return (self.first_token - self.arrival)[self.finished]

    @property
    def finished(self) -> np.ndarray:
        """bool [requests]."""
        return self.num_finishes > 0

    def gaps(self) -> tuple[np.ndarray, np.ndarray]:
        """Gaps between tokens in seconds, and how many requests had each; all replicas."""
        seconds = np.concatenate([np.asarray(u.gap_seconds, np.float64) for u in self.usage])
        counts = np.concatenate([np.asarray(u.gap_counts, np.int64) for u in self.usage])
        return seconds, counts

    def summary(self) -> Summary:
        """The numbers."""
        done = self.finished
        num_done = int(done.sum())
        duration = float(self.finish[done].max() - self.arrival.min()) if num_done else 0.0
        prompt, output = int(self.prompt_tokens[done].sum()), int(self.output_tokens[done].sum())
        busy = sum(u.busy_seconds for u in self.usage)
        blocks = sum(u.block_seconds / u.num_usable for u in self.usage)
        seconds, counts = self.gaps()

        def per_second(amount: float) -> float:
            return amount / duration if duration else 0.0

        return Summary(
            num_requests=len(done),
            num_finished=num_done,
            num_refused=len(done) - num_done,
            duration=duration,
            requests_per_second=per_second(num_done),
            output_tokens_per_second=per_second(output),
            total_tokens_per_second=per_second(prompt + output),
            ttft=Spread.of(self.ttft),
            itl=Spread.of(seconds, counts),
            e2e=Spread.of((self.finish - self.arrival)[done]),
            kv_usage_mean=blocks / busy if busy else 0.0,
            kv_usage_peak=max(u.peak_blocks / u.num_usable for u in self.usage),
            batch_mean=sum(u.request_seconds for u in self.usage) / busy if busy else 0.0,
            busy=busy / (duration * len(self.usage)) if duration else 0.0,
            prefix_hit_rate=float(self.cached_tokens[done].sum() / prompt) if prompt else 0.0,
            preemptions=int(self.preemptions.sum()),
            preempted_requests=int((self.preemptions > 0).sum()),
            num_steps=sum(u.num_steps for u in self.usage),
            num_scheduled_steps=sum(u.num_scheduled_steps for u in self.usage),
        )

    def as_dict(self) -> dict[str, Any]:
        """The summary and the wall time, for JSON."""
        return dataclasses.asdict(self.summary()) | {"wall_seconds": self.wall_seconds}
