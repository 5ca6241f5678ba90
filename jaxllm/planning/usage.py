"""What a replica's steps used: blocks, time, and the gaps between tokens."""

from array import array

MOST_POINTS = 2048


class Usage:
    """Sums over the steps of one replica, and a thinned record of them for plots.

    Attributes:
      num_usable: blocks of the pool that can be handed out.
      gap_seconds, gap_counts: gaps between a request's tokens, and how many requests had each.
      busy_seconds: time in steps.
      block_seconds: blocks in use, integrated over the time in steps.
      request_seconds: requests in a step, integrated over the time in steps.
      peak_blocks: most blocks in use.
      num_steps, num_scheduled_steps: all steps, and those that went through the scheduler.
      times, used, running, waiting: every `stride`-th step: when it ended, blocks in use, requests
        in it, requests waiting after it.
    """

    def __init__(self, num_usable: int):
        self.num_usable = num_usable
        self.gap_seconds = array("d")
        self.gap_counts = array("q")
        self.busy_seconds = 0.0
        self.block_seconds = 0.0
        self.request_seconds = 0.0
        self.peak_blocks = 0
        self.num_steps = 0
        self.num_scheduled_steps = 0
        self.stride = 1
        self.times = array("d")
        self.used = array("q")
        self.running = array("q")
        self.waiting = array("q")

    def add_gap(self, seconds: float, count: int) -> None:
        """`count` requests got a token `seconds` after the one before."""
        self.gap_seconds.append(seconds)
        self.gap_counts.append(count)

    def add_step(self, end: float, seconds: float, blocks: int, running: int, waiting: int) -> None:
        """A step of `running` requests that held `blocks` and ended at `end`."""
        self.busy_seconds += seconds
        self.block_seconds += seconds * blocks
        self.request_seconds += seconds * running
        if blocks > self.peak_blocks:
            self.peak_blocks = blocks
        if self.num_steps % self.stride == 0:
            self.times.append(end)
            self.used.append(blocks)
            self.running.append(running)
            self.waiting.append(waiting)
            if len(self.times) == MOST_POINTS:
                self._thin()
        self.num_steps += 1

    def _thin(self) -> None:
        for name in ("times", "used", "running", "waiting"):
            setattr(self, name, getattr(self, name)[::2])
        self.stride *= 2
