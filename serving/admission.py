"""Admission control: what is refused at the door, so that what is let in gets served."""

import collections
import dataclasses
import math
import time

from serving.errors import OverloadedError

# The rate of admissions is measured over this time.
_WINDOW_SECONDS = 30.0
_MIN_ADMISSIONS = 4


@dataclasses.dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """None is no limit.

    Attributes:
      max_num_queued_reqs: sequences that wait for a place, n samples counting n.
      max_num_queued_tokens: their prompt tokens.
      max_queue_time: seconds a new request would have to wait at the present rate.
    """

    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    max_queue_time: float | None = None


class Admission:
    """Counts what waits and what runs; every operation is O(1).

    Attributes:
      max_num_seqs: sequences that can run at once.
      num_waiting: what the engine said last.
    """

    def __init__(self, limits: AdmissionLimits):
        self._limits = limits
        self.max_num_seqs = 0
        self.num_waiting = 0
        self._queued: dict[str, int] = {}
        self._queued_tokens = 0
        self._running: set[str] = set()
        self._starts: collections.deque[float] = collections.deque()

    def admit(self, count: int, tokens: int) -> None:
        """Lets `count` sequences with `tokens` prompt tokens in.

        Raises:
          OverloadedError: not even one of them is let in.
        """
        limits = self._limits
        free = max(0, self.max_num_seqs - len(self._running))
        queued = len(self._queued) + count - free
        retry_after = max(1, min(60, math.ceil(self._wait(len(self._queued)))))
        if limits.max_num_queued_reqs is not None and (
            queued > limits.max_num_queued_reqs or self.num_waiting > limits.max_num_queued_reqs
        ):
            raise OverloadedError(
                f"too many requests wait: {len(self._queued)}, and max_num_queued_reqs is "
                f"{limits.max_num_queued_reqs}",
                "max_num_queued_reqs",
                retry_after,
            )
        if (
            limits.max_num_queued_tokens is not None
            and queued > 0
            and self._queued_tokens + tokens > limits.max_num_queued_tokens
        ):
            raise OverloadedError(
                f"too many prompt tokens wait: {self._queued_tokens}, and max_num_queued_tokens is "
                f"{limits.max_num_queued_tokens}",
                "max_num_queued_tokens",
                retry_after,
            )
        wait = self._wait(queued)
        if limits.max_queue_time is not None and wait > limits.max_queue_time:
            raise OverloadedError(
                f"the request would wait about {wait:.0f} s, and max_queue_time is "
                f"{limits.max_queue_time:g} s",
                "max_queue_time",
                retry_after,
            )

    def queue(self, internal_id: str, tokens: int) -> None:
        self._queued[internal_id] = tokens
        self._queued_tokens += tokens

    def start(self, internal_id: str, started: float) -> None:
        """The engine scheduled a sequence for the first time."""
        tokens = self._queued.pop(internal_id, None)
        if tokens is not None:
            self._queued_tokens -= tokens
            self._running.add(internal_id)
            self._starts.append(started)

    def end(self, internal_id: str) -> None:
        tokens = self._queued.pop(internal_id, None)
        if tokens is not None:
            self._queued_tokens -= tokens
        self._running.discard(internal_id)

    def clear(self) -> None:
        """The engine is gone, and everything with it."""
        self._queued.clear()
        self._queued_tokens = 0
        self._running.clear()
        self.num_waiting = 0

    def _wait(self, queued: int) -> float:
        """Seconds until `queued` sequences have started, at the present rate; 0 if unknown."""
        now = time.monotonic()
        while self._starts and self._starts[0] < now - _WINDOW_SECONDS:
            self._starts.popleft()
        if queued <= 0 or len(self._starts) < _MIN_ADMISSIONS:
            return 0.0
        return queued * (now - self._starts[0]) / len(self._starts)
