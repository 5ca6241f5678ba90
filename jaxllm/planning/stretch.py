"""Decode steps played forward without the scheduler.

Most steps only give every running request one more token. A stretch of such steps needs no
decision: per step it moves the clock, per block boundary it takes and registers a block, and per
end of a request it calls the scheduler's own `finish`, all in the order in which the scheduler
would have done it.
"""

import enum

from jaxllm.engine.request import FinishReason
from jaxllm.engine.scheduler import Scheduler
from jaxllm.planning.device import SimulatedRequest, SimulatedRunner
from jaxllm.planning.usage import Usage

# A stretch costs about as much as a step to begin and to end.
SHORTEST = 3


class Outcome(enum.Enum):
    """Why `play` stopped.

    PAUSED: the time was reached; it can be played on.
    ENDED: a request ended and others wait, or none is left.
    STARVED: the next step needs more blocks than are free.
    """

    PAUSED = "paused"
    ENDED = "ended"
    STARVED = "starved"


class Stretch:
    """The running requests and what they have been given since the stretch began.

    Every request has exactly one token to run in each step. `settle` must be called before the
    scheduler runs again.

    Attributes:
      num_alive: requests that still run.
      finished: those that ended since the caller last took them away.
    """

    def __init__(
        self,
        requests: list[SimulatedRequest],
        scheduler: Scheduler,
        runner: SimulatedRunner,
        usage: Usage,
    ):
        self.scheduler = scheduler
        self.runner = runner
        self.usage = usage
        self.num_alive = len(requests)
        self.finished: list[SimulatedRequest] = []
        self._requests = requests
        self._alive = [True] * len(requests)
        self._caching = scheduler.pool.enable_caching
        self._block_size = scheduler.config.block_size
        self._steps = 0
        self._base_tokens = [len(request.token_ids) for request in requests]
        # Tokens that the next step attends to: each request's newest one is attended to as well.
        self._context = sum(self._base_tokens)
        # (step, place) of each request's last token, the first to end last.
        self._ends = sorted(
            ((r.max_total_tokens - len(r.token_ids) - 1, i) for i, r in enumerate(requests)),
            reverse=True,
        )
        # For each phase of block_size, the places of the requests that need a block in its steps.
        self._crossings: list[list[int]] = [[] for _ in range(self._block_size)]
        for place, request in enumerate(requests):
            self._crossings[self._phase(request.num_computed_tokens)].append(place)

    def play(self, time: float) -> Outcome:
        """Plays the steps that begin before `time`, up to the end of the stretch."""
        runner, usage, waiting = self.runner, self.usage, self.scheduler.waiting
        pool, seconds_of = self.scheduler.pool, self.runner.model.seconds
        requests, crossings, block_size = self._requests, self._crossings, self._block_size
        gap_seconds, gap_counts = usage.gap_seconds, usage.gap_counts
        num, context, steps = self.num_alive, self._context, self._steps
        used, now = pool.num_used, runner.now
        next_end = self._ends[-1][0]
        while now < time:
            taking = crossings[steps % block_size]
            if taking:
                if len(taking) > pool.num_free:
                    return Outcome.STARVED
                for place, block in zip(taking, pool.take(len(taking)), strict=True):
                    requests[place].block_ids.append(block)
                used += len(taking)
            seconds = seconds_of(0, num, context)
            end = now + seconds
            gap_seconds.append(end - now)
            gap_counts.append(num)
            now = end
            usage.add_step(now, seconds, used, num, len(waiting))
            steps += 1
            context += num
            self._steps, self._context, runner.now = steps, context, now
            if self._caching:
                for place in crossings[steps % block_size]:
                    request = requests[place]
                    full = request.num_registered_blocks
                    pool.register(request.block_ids[full], request.block_hashes[full])
                    request.num_registered_blocks = full + 1
            if next_end < steps:
                self._end_due()
                if not self._ends or len(waiting):
                    return Outcome.ENDED
                num, context, used = self.num_alive, self._context, pool.num_used
                next_end = self._ends[-1][0]
        return Outcome.PAUSED

    def settle(self) -> None:
        """Gives the requests that still run the tokens that were played."""
        for place, alive in enumerate(self._alive):
            if alive:
                self._bring_up(place)
        self.runner.free_at = self.runner.now

    def _end_due(self) -> None:
        """Ends the requests that got their last token in the step just played."""
        while self._ends and self._ends[-1][0] < self._steps:
            _, place = self._ends.pop()
            request = self._requests[place]
            self._crossings[self._phase(request.num_computed_tokens)].remove(place)
            self._alive[place] = False
            self.num_alive -= 1
            self._context -= self._base_tokens[place] + self._steps
            self._bring_up(place)
            self.scheduler.finish(request, FinishReason.LENGTH)
            self.finished.append(request)

    def _bring_up(self, place: int) -> None:
        request = self._requests[place]
        request.token_ids.extend([0] * self._steps)
        request.num_computed_tokens += self._steps
        request.last_token_time = self.runner.now

    def _phase(self, computed: int) -> int:
        return -computed % self._block_size


def begin_stretch(
    scheduler: Scheduler,
    runner: SimulatedRunner,
    usage: Usage,
    *,
    head_blocked: bool,
    time: float,
) -> Stretch | None:
    """A stretch, if the coming steps are one and it is worth it; else None.

    Args:
      head_blocked: the first waiting request is known not to fit as long as nothing ends.
      time: until when steps may be played; only a guess of the worth depends on it.
    """
    running, limits, now = scheduler.running, scheduler.config, runner.now
    num, waiting = len(running), len(scheduler.waiting)
    if not num or num > limits.max_num_batched_tokens:
        return None
    if waiting and not head_blocked and num < limits.max_num_seqs:
        return None
    caching = scheduler.pool.enable_caching
    requests: list[SimulatedRequest] = []
    steps_left = SHORTEST
    context = 0
    for request in running:
        if not isinstance(request, SimulatedRequest):
            return None
        tokens, computed = len(request.token_ids), request.num_computed_tokens
        if tokens - computed != 1 or request.last_token_time != now:
            return None
        if caching and request.num_registered_blocks != computed // limits.block_size:
            return None
        if waiting:
            steps_left = min(steps_left, request.max_total_tokens - tokens)
        context += tokens
        requests.append(request)
    if steps_left < SHORTEST or now + SHORTEST * runner.model.seconds(0, num, context) >= time:
        return None
    return Stretch(requests, scheduler, runner, usage)
