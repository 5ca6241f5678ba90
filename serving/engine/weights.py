"""Weights and sleep in the engine process: control functions, and what their failures mean."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.engine.step_plan import EngineOutput
from jaxllm.errors import AsleepError, BusyError

if TYPE_CHECKING:
    from jaxllm.weights import WeightControl


class EngineWeights:
    """Control functions over one engine. `give` takes the news that come of them."""

    def __init__(self, engine: Any, give: Callable[[list[EngineOutput]], None]):
        self._engine = engine
        self._give = give
        self._made: WeightControl | None = None

    @property
    def is_sleeping(self) -> bool:
        return self._made is not None and self._made.is_sleeping

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """By name, as `EngineClient.call` calls them."""
        return {
            "describe_weights": self._describe,
            "sleep": self._sleep,
            "wake_up": self._wake_up,
            "update_weights": self._update,
        }

    @property
    def _control(self) -> "WeightControl":
        if self._made is None:
            # Engines without a device never come here, and need no JAX.
            from jaxllm.weights import WeightControl

            self._made = WeightControl(self._engine)
        return self._made

    def _describe(self) -> list[tuple[str, list[int]]]:
        """(name, shape) of every weight."""
        abstract = self._engine.runner.model.source
        return [(name, list(leaf.shape)) for name, leaf in abstract.items()]

    def _sleep(self, level: int, running: Any) -> bool:
        self._give(self._control.sleep(level, running=running))
        return self.is_sleeping

    def _wake_up(self, tags: list[str] | None) -> bool:
        self._control.wake_up(tags)
        return self.is_sleeping

    def _update(self, folder: str, running: Any) -> dict[str, Any]:
        self._give(self._control.update(folder, running=running))
        abstract = self._engine.runner.model.abstract.values()
        return {
            "num_tensors": len(abstract),
            "num_bytes": sum(
                int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in abstract
            ),
            "sleeping": self.is_sleeping,
        }


def fault_of(error: Exception) -> str:
    """Whose fault an error of a control function is, as `serving.errors.ControlError` says."""
    if isinstance(error, (BusyError, AsleepError)):
        return "state"
    return "argument" if isinstance(error, ValueError) else "engine"
