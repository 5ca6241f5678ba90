"""Measures steps of a running engine, for the simulator to be fitted to."""

import time
from collections.abc import Callable

from jaxllm.engine.core import EngineCore, PendingStep, StepRunner
from jaxllm.engine.step_plan import StepPlan, StepResult
from jaxllm.planning.device import plan_features
from jaxllm.planning.step_time import StepSample


class StepRecorder:
    """Stands between an EngineCore and its runner and times every step.

    A step's time runs from the end of the one before it, so that it holds the host's work too. If
    every request of the step is new, the engine may have been idle, and it runs from its dispatch.

    Attributes:
      samples: of the steps that have ended, in order.
    """

    def __init__(self, runner: StepRunner, clock: Callable[[], float] = time.monotonic):
        self.runner = runner
        self.samples: list[StepSample] = []
        self._clock = clock
        self._last_end = float("-inf")

    @classmethod
    def install(
        cls, core: EngineCore, clock: Callable[[], float] = time.monotonic
    ) -> "StepRecorder":
        """Puts a recorder into `core`, which may hold no request; `uninstall` takes it out.

        Raises:
          ValueError: the core has unfinished requests.
        """
        if core.has_unfinished:
            raise ValueError("steps cannot be recorded from the middle of a run")
        core.runner = recorder = cls(core.runner, clock)
        return recorder

    def uninstall(self, core: EngineCore) -> None:
        """Gives the core its own runner back."""
        core.runner = self.runner

    def dispatch(self, plan: StepPlan) -> "_TimedStep":
        """See StepRunner."""
        began = self._clock()
        may_have_idled = len(plan.admitted) == len(plan.requests)
        features = plan_features(plan)
        pending = self.runner.dispatch(plan)
        return _TimedStep(self, pending, began, may_have_idled, features)

    def reset(self) -> None:
        """See StepRunner; samples are kept."""
        self.runner.reset()

    def add(self, began: float, may_have_idled: bool, features: tuple[int, int, int, int]) -> None:
        """Records a step that has just ended."""
        end = self._clock()
        start = max(began, self._last_end) if may_have_idled else max(self._last_end, 0.0)
        prefill, decode, context, pairs = features
        seconds = max(end - start, 1e-9)
        self.samples.append(StepSample(prefill, decode, context, seconds, pairs))
        self._last_end = end


class _TimedStep:
    def __init__(
        self,
        recorder: StepRecorder,
        pending: PendingStep,
        began: float,
        may_have_idled: bool,
        features: tuple[int, int, int, int],
    ):
        self._recorder = recorder
        self._pending = pending
        self._step = (began, may_have_idled, features)

    def result(self) -> StepResult:
        result = self._pending.result()
        self._recorder.add(*self._step)
        return result
