"""EngineCore: the loop that feeds the device, one step at a time.

Two loops with equal outputs. The plain one waits for each step's tokens before it plans the
next. The asynchronous one plans and dispatches step n + 1 before the tokens of step n reach
the host: a running request's next token is read on the device, from its slot.
"""

from collections import deque
from typing import Protocol

from jaxllm.engine.block_pool import BlockPool
from jaxllm.engine.request import FinishReason, Request
from jaxllm.engine.scheduler import Scheduler, SchedulerConfig
from jaxllm.engine.step_plan import EngineOutput, StepPlan, StepResult


class PendingStep(Protocol):
    """A dispatched step."""

    def result(self) -> StepResult:
        """Waits for the step's tokens."""


class StepRunner(Protocol):
    """The device side, as the loop sees it."""

    def dispatch(self, plan: StepPlan) -> PendingStep:
        """Starts a step; steps run on the device in the order of dispatch."""

    def reset(self) -> None:
        """Forgets every slot, after a step failed or was interrupted."""


class EngineCore:
    """Scheduler, block pool and runner, driven by `step`."""

    def __init__(
        self,
        config: SchedulerConfig,
        runner: StepRunner,
        *,
        num_blocks: int,
        enable_prefix_caching: bool = True,
        async_scheduling: bool = False,
    ):
        self.config = config
        self.runner = runner
        self.enable_prefix_caching = enable_prefix_caching
        self.num_blocks = num_blocks
        self.depth = 2 if async_scheduling else 1
        self._in_flight: deque[tuple[StepPlan, PendingStep]] = deque()
        self.scheduler = self._new_scheduler()

    def _new_scheduler(self) -> Scheduler:
        pool = BlockPool(self.num_blocks, self.enable_prefix_caching)
        return Scheduler(self.config, pool)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.scheduler.requests)

    def add(self, request: Request) -> None:
        """Queues a request; CapacityError if it can never fit."""
        self.scheduler.add(request)

    def abort(self, request_ids: list[str]) -> list[EngineOutput]:
        """Ends requests at once; ids that are unknown or finished are ignored."""
        outputs = []
        for request_id in request_ids:
            request = self.scheduler.requests.get(request_id)
            if request is not None:
                self.scheduler.finish(request, FinishReason.ABORT)
                outputs.append(EngineOutput(request, [], FinishReason.ABORT))
        return outputs

    def step(self) -> list[EngineOutput]:
        """Plans and dispatches a step, and returns the news of the oldest one when it is due."""
        if self._in_flight and self.scheduler.num_host_bound:
            # What some request may sample next depends on the tokens in flight.
            return self._collect()
        plan = self.scheduler.schedule()
        if plan.requests:
            self._in_flight.append((plan, self.runner.dispatch(plan)))
        if self._in_flight and (len(self._in_flight) >= self.depth or not plan.requests):
            return self._collect()
        return []

    def _collect(self) -> list[EngineOutput]:
        done, pending = self._in_flight.popleft()
        return self.scheduler.update(done, pending.result())

    def finish_early(self, request: Request) -> None:
        """Ends a request whose text met a stop string, if it has not ended by itself."""
        if not request.is_finished:
            self.scheduler.finish(request, FinishReason.STOP)

    def drain(self) -> list[EngineOutput]:
        """Waits for the steps in flight and returns their news."""
        return [output for _ in range(len(self._in_flight)) for output in self._collect()]

    def reset(self) -> None:
        """Drops every request and all cached content: the state of a fresh engine.

        For use after a step raised, when host and device may disagree about what ran.
        """
        self._in_flight.clear()
        self.runner.reset()
        self.scheduler = self._new_scheduler()

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """See Scheduler.reset_prefix_cache."""
        return self.scheduler.reset_prefix_cache(preempt_running)
