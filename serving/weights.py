"""Sleep, wake-up and new weights of a served engine, from the API process."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from serving.errors import ControlError

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class WeightAccess:
    """What clients may do to the weights.

    Attributes:
      allowed: put the engine to sleep and send weights.
      folder: where checkpoints lie that clients may name; None: none.
    """

    allowed: bool = False
    folder: Path | None = None

    def check(self) -> None:
        """Raises ControlError where weights are not in clients' hands."""
        if not self.allowed:
            raise ControlError(
                "this server does not let clients control its weights (--enable-weight-control)",
                "denied",
            )

    def find(self, path: str) -> Path:
        """The checkpoint at a path below `folder`, links followed.

        Raises:
          ControlError: paths are not allowed, this one leads elsewhere, or nothing is there.
        """
        if self.folder is None:
            raise ControlError("this server reads no weights from paths (--weights-dir)", "denied")
        root = self.folder.resolve()
        try:
            found = (root / path).resolve()
        except (OSError, ValueError, RuntimeError) as error:
            raise ControlError(f"path {path!r}: {error}", "argument") from None
        if not found.is_relative_to(root):
            raise ControlError(f"path {path!r} leads out of the folder for weights", "denied")
        if not found.exists():
            raise ControlError(f"path {path!r}: nothing is there", "missing")
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class Updated:
    """New weights are in place.

    Attributes:
      num_bytes: of the weights as the engine holds them.
      seconds: that the engine took.
    """

    version: str
    num_tensors: int
    num_bytes: int
    seconds: float


class ServedWeights:
    """State of the engine's weights. One change at a time.

    Attributes:
      is_sleeping: requests are refused until `wake_up`.
      is_changing: the engine is at it, and ends no step meanwhile.
      version: of the last update; "" for the weights the engine started with. An engine that was
        restarted has those again.
    """

    def __init__(self, call: Callable[..., Awaitable[Any]]):
        self._call = call
        self._is_taken = False
        self.is_sleeping = False
        self.is_changing = False
        self.version = ""

    async def describe(self) -> list[tuple[str, tuple[int, ...]]]:
        """(name, shape) of every weight of the model."""
        return [(name, tuple(shape)) for name, shape in await self._call("describe_weights")]

    async def sleep(self, level: int = 1, running: str = "refuse") -> None:
        """See LLM.sleep. Requests that are kept go on after the wake-up."""
        with self.exclusively():
            self.is_sleeping = True
            try:
                await self._change("sleep", level=level, running=running)
            except ControlError:
                # The engine knows: it may have been asleep before, or have fallen half asleep.
                self.is_sleeping = bool(await self._change("wake_up", tags=[]))
                raise

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """See LLM.wake_up."""
        with self.exclusively():
            wanted = list(tags) if tags is not None else None
            self.is_sleeping = bool(await self._change("wake_up", tags=wanted))

    async def update(self, place: Path, version: str = "", running: str = "refuse") -> Updated:
        """Reads a checkpoint, or a folder of safetensors, into the engine; see LLM.update_weights.

        For use inside `exclusively`.
        """
        began = time.monotonic()
        done = await self._change("update_weights", folder=str(place), running=running)
        self.version = version
        self.is_sleeping = bool(done["sleeping"])
        seconds = time.monotonic() - began
        logger.info("weights of version %r in %.2f s", version, seconds)
        return Updated(version, done["num_tensors"], done["num_bytes"], seconds)

    @contextlib.contextmanager
    def exclusively(self) -> Iterator[None]:
        """For one change of the weights; ControlError while another is under way."""
        if self._is_taken:
            raise ControlError("another change of the weights is under way", "state")
        self._is_taken = True
        try:
            yield
        finally:
            self._is_taken = False

    async def _change(self, name: str, **arguments: Any) -> Any:
        self.is_changing = True
        try:
            return await self._call(name, **arguments)
        finally:
            self.is_changing = False

    def forget(self) -> None:
        """The engine is lost; the next one starts with the weights of the command line."""
        if self.version:
            logger.warning("the weights of version %r are lost with the engine", self.version)
        self.is_sleeping = False
        self.version = ""
