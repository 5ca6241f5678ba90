"""Notes what each step runs, on its way from the scheduler to the device."""

from typing import Any

from jaxllm.engine.core import PendingStep, StepRunner
from jaxllm.engine.request import Request
from jaxllm.engine.step_plan import StepPlan


class PlanRecorder:
    """A StepRunner that passes everything on and keeps the news of the last plan.

    Attributes:
      num_steps: dispatched so far.
      step_tokens: tokens of the plans since the last `take`.
      started: requests scheduled for the first time since the last `take`.
    """

    def __init__(self, runner: StepRunner):
        self._runner = runner
        self.num_steps = 0
        self.step_tokens = 0
        self.started: list[Request] = []

    def dispatch(self, plan: StepPlan) -> PendingStep:
        self.num_steps += 1
        self.step_tokens += plan.num_tokens
        self.started += [request for request in plan.admitted if not request.num_preemptions]
        return self._runner.dispatch(plan)

    def take(self) -> tuple[int, list[Request]]:
        """(step_tokens, started), which begin anew."""
        taken = self.step_tokens, self.started
        self.step_tokens, self.started = 0, []
        return taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)
