"""What a client saw of one request."""

import dataclasses


@dataclasses.dataclass(slots=True)
class Timeline:
    """One request. Times are seconds on the monotonic clock, differences in seconds.

    Attributes:
      start: when it was sent.
      ttft: start to the first piece of output; 0 if none came.
      itl: gaps between pieces of output. A server may put several tokens into a piece.
      latency: start to the last piece of output.
      queue: wait for a place under --max-concurrency, before `start`.
      prompt_len, output_len: tokens, as the server counts them where it says so.
      error: "" for a request that was answered.
    """

    start: float = 0.0
    ttft: float = 0.0
    itl: list[float] = dataclasses.field(default_factory=list)
    latency: float = 0.0
    queue: float = 0.0
    prompt_len: int = 0
    output_len: int = 0
    text: str = ""
    error: str = "not finished"

    @property
    def success(self) -> bool:
        return not self.error

    @property
    def tpot(self) -> float:
        """Mean time per token after the first; 0 for one token."""
        if self.output_len < 2:
            return 0.0
        return (self.latency - self.ttft) / (self.output_len - 1)

    def note(self, now: float) -> None:
        """A piece of output came at `now`."""
        if self.ttft == 0.0:
            self.ttft = now - self.start
        else:
            self.itl.append(now - self.start - self.latency)
        self.latency = now - self.start
