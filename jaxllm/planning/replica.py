"""One simulated replica: the real EngineCore on a virtual clock."""

import dataclasses
from collections import deque

import numpy as np

from jaxllm.engine.core import EngineCore
from jaxllm.engine.scheduler import SchedulerConfig
from jaxllm.planning.device import SimulatedRequest, SimulatedRunner
from jaxllm.planning.step_time import StepTimeModel
from jaxllm.planning.stretch import Outcome, Stretch, begin_stretch
from jaxllm.planning.usage import Usage


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """One replica's engine.

    Attributes:
      num_blocks: P, the null block included.
      async_scheduling: plan a step while the one before it runs; then nothing is played forward.
      fast_forward: False runs every step through the scheduler; the results are the same.
    """

    scheduler: SchedulerConfig
    num_blocks: int
    enable_prefix_caching: bool = True
    async_scheduling: bool = False
    fast_forward: bool = True


class Records:
    """What happened to each request of a trace, by its index: arrays [requests].

    Attributes:
      first_token, finish: float64 seconds on the trace's clock; nan until then.
      cached_tokens: prompt tokens found in the prefix cache.
      output_tokens: tokens it got.
      preemptions: how often it was preempted.
      replica: which replica served it; -1 where it was refused.
      num_finishes: how often it ended.
    """

    def __init__(self, count: int):
        self.first_token = np.full(count, np.nan)
        self.finish = np.full(count, np.nan)
        self.cached_tokens = np.zeros(count, np.int64)
        self.output_tokens = np.zeros(count, np.int64)
        self.preemptions = np.zeros(count, np.int32)
        self.replica = np.full(count, -1, np.int32)
        self.num_finishes = np.zeros(count, np.int32)

    def merge(self, other: "Records") -> None:
        """Takes over the requests that `other` served; no request may be served by both."""
        served = other.replica >= 0
        for name, values in vars(self).items():
            values[served] = getattr(other, name)[served]


class Replica:
    """An EngineCore driven from arrival to arrival."""

    def __init__(self, config: ReplicaConfig, model: StepTimeModel, records: Records, index: int):
        self.config = config
        self.records = records
        self.index = index
        self.runner = SimulatedRunner(model)
        self.core = EngineCore(
            config.scheduler,
            self.runner,
            num_blocks=config.num_blocks,
            enable_prefix_caching=config.enable_prefix_caching,
            async_scheduling=config.async_scheduling,
        )
        self.scheduler = self.core.scheduler
        self.runner.pool = self.scheduler.pool
        self.usage = Usage(self.scheduler.pool.num_usable)
        self.num_assigned = 0
        self._num_finished = 0
        self._finish_times: deque[float] = deque()
        self._plays_forward = config.fast_forward and not config.async_scheduling
        self._stretch: Stretch | None = None
        # The head of the queue was seen not to fit, and nothing that could admit it has happened.
        self._head_blocked = False

    @property
    def now(self) -> float:
        """When the next step can begin."""
        return self.runner.now

    @property
    def has_unfinished(self) -> bool:
        return self.core.has_unfinished

    def load(self, time: float) -> int:
        """Requests assigned and not finished at `time`; times must not fall."""
        while self._finish_times and self._finish_times[0] <= time:
            self._finish_times.popleft()
            self._num_finished += 1
        return self.num_assigned - self._num_finished

    def submit(self, request: SimulatedRequest, time: float) -> None:
        """Queues a request that arrives at `time`; every step that begins before has run.

        Raises:
          CapacityError: it can never fit the pool.
        """
        limits = self.config.scheduler
        if limits.policy != "fcfs":
            # The newcomer may stand before the one that did not fit.
            self._head_blocked = False
        stretch = self._stretch
        if stretch and not self._head_blocked and stretch.num_alive < limits.max_num_seqs:
            self._settle(stretch)
        self.core.add(request)
        self.num_assigned += 1
        self.records.replica[request.index] = self.index
        if len(self.scheduler.requests) == 1:
            self.runner.now = max(self.runner.now, time)

    def run_until(self, time: float) -> None:
        """Runs every step that begins before `time`."""
        while self.runner.now < time and self.scheduler.requests:
            if self._stretch is None and self._plays_forward:
                self._stretch = begin_stretch(
                    self.scheduler,
                    self.runner,
                    self.usage,
                    head_blocked=self._head_blocked,
                    time=time,
                )
            if self._stretch is None:
                self._step()
            else:
                self._play(self._stretch, time)

    def _play(self, stretch: Stretch, time: float) -> None:
        outcome = stretch.play(time)
        for request in stretch.finished:
            self._record_finish(request, request.last_token_time)
        stretch.finished.clear()
        if outcome is not Outcome.PAUSED:
            self._settle(stretch)
            self._head_blocked = False
        if outcome is Outcome.STARVED:
            # Someone must be preempted, which is the scheduler's choice.
            self._step()

    def _settle(self, stretch: Stretch) -> None:
        stretch.settle()
        self._stretch = None

    def _step(self) -> None:
        """One step through the scheduler."""
        runner, scheduler = self.runner, self.scheduler
        num_waiting, num_running = len(scheduler.waiting), len(scheduler.running)
        preemptions = scheduler.stats.num_preemptions
        steps = runner.num_steps
        outputs = self.core.step()
        now, records = runner.now, self.records
        gaps: dict[float, int] = {}
        for output in outputs:
            request = output.request
            if not isinstance(request, SimulatedRequest):
                raise TypeError(f"{request!r} is not a simulated request")
            if request.num_output_tokens == 1:
                records.first_token[request.index] = now
                records.cached_tokens[request.index] = request.num_cached_tokens
            else:
                gap = now - request.last_token_time
                gaps[gap] = gaps.get(gap, 0) + 1
            request.last_token_time = now
            if output.finish_reason is not None:
                self._record_finish(request, now)
        for gap, count in gaps.items():
            self.usage.add_gap(gap, count)
        if runner.num_steps > steps:
            self.usage.add_step(
                runner.free_at,
                runner.last_seconds,
                runner.last_used,
                runner.last_running,
                len(scheduler.waiting),
            )
            self.usage.num_scheduled_steps += 1
        # Only a step of decodes alone shows that the head does not fit: one with prompts may have
        # had no tokens left. Blocks that ended requests gave back may admit it now.
        self._head_blocked = (
            runner.last_was_decode
            and num_waiting > 0
            and len(scheduler.waiting) == num_waiting
            and len(scheduler.running) == num_running
            and scheduler.stats.num_preemptions == preemptions
        )

    def _record_finish(self, request: SimulatedRequest, time: float) -> None:
        records, index = self.records, request.index
        records.finish[index] = time
        records.output_tokens[index] = request.num_output_tokens
        records.preemptions[index] = request.num_preemptions
        records.num_finishes[index] += 1
        self._finish_times.append(time)
