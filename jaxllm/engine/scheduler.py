"""Scheduler: who runs in the next step, with how many tokens, on which blocks.

There is no prefill phase and no decode phase: a step brings every request's computed tokens
closer to its known tokens. Running requests come first, in order, so that decodes get their
token before a long prompt takes the rest of the budget.
"""

import dataclasses
import time

from jaxllm.engine.block_pool import BlockPool
from jaxllm.engine.prefix_cache import find_cached_prefix, register_full_blocks
from jaxllm.engine.request import FinishReason, Request, RequestStatus
from jaxllm.engine.step_plan import EngineOutput, StepPlan, StepResult
from jaxllm.engine.waiting_queue import FcfsQueue, PriorityQueue, WaitingQueue
from jaxllm.errors import CapacityError, ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step.

    Attributes:
      max_num_seqs: most running requests, and the number of device slots.
      max_num_batched_tokens: token budget of a step.
      max_model_len: most tokens of a request, prompt and output.
      block_size: tokens in a KV block.
      long_prefill_token_threshold: most prompt tokens a request gets in a step while others are
        eligible too; 0 is no limit.
      enable_chunked_prefill: cut prompts that do not fit the budget; without it a prompt waits
        for a step that takes it whole.
      policy: "fcfs", or "priority" (smaller values first, ties by arrival).
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    policy: str = "fcfs"

    def __post_init__(self) -> None:
        if self.policy not in ("fcfs", "priority"):
            raise ConfigError(f"scheduling policy {self.policy!r}: 'fcfs' or 'priority'")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_model_len="
                f"{self.max_model_len}: without chunked prefill a full-length prompt never fits"
            )


@dataclasses.dataclass(slots=True)
class SchedulerStats:
    """Counters since the start. Prefix counters are in tokens, first admissions only."""

    num_preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


class Scheduler:
    """Holds every unfinished request and the block pool."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool):
        self.config = config
        self.pool = pool
        self.waiting: WaitingQueue = PriorityQueue() if config.policy == "priority" else FcfsQueue()
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.stats = SchedulerStats()
        self.num_host_bound = 0
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
          CapacityError: at full length it needs more blocks than the pool has.
          ValueError: a request of this id is unfinished.
        """
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is already in use")
        # The last token of a request is sampled but never fed back, so it needs no K/V.
        needed = self._num_blocks(request.max_total_tokens - 1)
        if needed > self.pool.num_usable:
            raise CapacityError(
                request.request_id, needed, self.pool.num_usable, self.config.block_size
            )
        self.requests[request.request_id] = request
        self.num_host_bound += request.needs_host_tokens
        self.waiting.add(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends an unfinished request in any state and gives its blocks and slot back.

        Steps in flight may still write to its blocks; steps run in order on the device, so a
        later owner of the blocks writes after them.
        """
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._release(request)
        elif not request.is_finished:
            self.waiting.remove(request)
        self._forget(request, reason)

    def schedule(self) -> StepPlan:
        """Plans the next step; an empty plan means that nothing can run now."""
        plan = StepPlan()
        self._schedule_running(plan)
        for request, count in zip(plan.requests, plan.counts, strict=True):
            if count > 1:
                register_full_blocks(self.pool, request, self.config.block_size)
        if not plan.num_preempted:
            self._schedule_waiting(plan)
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Records the tokens a step sampled; requests that end give their blocks back."""
        outputs = []
        any_finished = False
        now = time.monotonic()
        block_size = self.config.block_size
        tokens = iter(result.token_ids.tolist())
        row = -1
        self._record_prompt_logprobs(plan, result)
        finished = RequestStatus.FINISHED
        for request, samples in zip(plan.requests, plan.samples, strict=True):
            if not samples:
                continue
            token = next(tokens)
            row += 1
            if request.status is finished:
                continue
            request.num_in_flight -= 1
            if request.first_token_time is None:
                request.first_token_time = now
            reason = request.append(token)
            output = EngineOutput(request, [token], reason)
            if result.logprobs is not None and request.params.logprobs is not None:
                output.logprobs = [result.logprobs.row(row, token, request.params.logprobs)]
            outputs.append(output)
            if len(request.token_ids) // block_size > request.num_registered_blocks:
                register_full_blocks(self.pool, request, block_size)
            if reason is not None:
                any_finished |= request.status is RequestStatus.RUNNING
                self._end(request, reason)
        if any_finished:
            self.running = [request for request in self.running if not request.is_finished]
        return outputs

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Forgets cached content; False (and no change) while requests hold blocks.

        With preempt_running they give their blocks back first and are recomputed.
        """
        if preempt_running:
            for request in reversed(self.running):
                self._preempt(request)
            self.running.clear()
        return self.pool.reset_cache()

    def _schedule_running(self, plan: StepPlan) -> None:
        block_size = self.config.block_size
        budget = self.config.max_num_batched_tokens
        index = 0
        while index < len(self.running) and budget > plan.num_tokens:
            request = self.running[index]
            index += 1
            total = len(request.token_ids) + request.num_in_flight
            missing = total - request.num_computed_tokens
            if missing <= 0 or total >= request.max_total_tokens:
                # Nothing to run before a token in flight lands, or that token is the last one.
                continue
            if missing == 1 and request.num_computed_tokens < len(request.block_ids) * block_size:
                # Most entries of most steps: a decode whose block has room.
                self._plan(plan, request, 1, total)
                continue
            count = min(self._chunk(missing), budget - plan.num_tokens)
            while not self._grow(request, request.num_computed_tokens + count):
                victim = self._victim()
                position = self.running.index(victim)
                del self.running[position]
                if position < index - 1:
                    # The victim was planned already in this step; its tokens go back.
                    index -= 1
                    if victim in plan.requests and plan.remove(victim):
                        victim.num_in_flight -= 1
                elif victim is request:
                    index -= 1
                self._preempt(victim)
                plan.num_preempted += 1
                if victim is request:
                    break
            else:
                self._plan(plan, request, count, total)

    def _schedule_waiting(self, plan: StepPlan) -> None:
        config, pool = self.config, self.pool
        while (
            self.waiting
            and len(self.running) < config.max_num_seqs
            and plan.num_tokens < config.max_num_batched_tokens
        ):
            request = self.waiting.peek()
            if request.num_in_flight:
                # Preempted with a token on its way: recomputing must wait to know it.
                break
            budget = config.max_num_batched_tokens - plan.num_tokens
            cached = find_cached_prefix(pool, request, config.block_size)
            num_cached = len(cached) * config.block_size
            missing = request.num_tokens - num_cached
            if missing > budget and not config.enable_chunked_prefill:
                break
            # Admit only what the pool could take whole now, or chunks would evict each other.
            fresh = self._num_blocks(request.num_tokens) - len(cached)
            if fresh > pool.num_free - pool.num_unreferenced(cached):
                break
            self.waiting.pop()
            pool.share(cached)
            count = min(self._chunk(missing), budget)
            request.block_ids = cached
            request.num_registered_blocks = len(cached)
            request.num_computed_tokens = num_cached
            self._grow(request, num_cached + count)
            self._admit(plan, request, num_cached)
            self._plan(plan, request, count, request.num_tokens)
            register_full_blocks(pool, request, config.block_size)

    def _record_prompt_logprobs(self, plan: StepPlan, result: StepResult) -> None:
        for index, rows in result.prompt_logprobs.items():
            request, start = plan.requests[index], plan.starts[index]
            wanted = request.params.prompt_logprobs
            if wanted is None:
                continue
            # A recomputed request brings again what it has already.
            for i in range(len(request.prompt_logprobs) - start, len(rows.logprobs)):
                token = request.token_ids[start + i + 1]
                request.prompt_logprobs.append(rows.row(i, token, wanted))

    def _admit(self, plan: StepPlan, request: Request, num_cached: int) -> None:
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_cached
            if self.pool.enable_caching:
                self.stats.prefix_queries += request.num_tokens
                self.stats.prefix_hits += num_cached
        if request.first_scheduled_time is None:
            request.first_scheduled_time = time.monotonic()
        request.status = RequestStatus.RUNNING
        request.slot = self._free_slots.pop()
        request.token_on_device = False
        self.running.append(request)
        plan.admitted.append(request)

    def _plan(self, plan: StepPlan, request: Request, count: int, total: int) -> None:
        start = request.num_computed_tokens
        samples = start + count == total
        plan.add(request, start, count, samples, request.token_on_device)
        request.num_computed_tokens = start + count
        request.num_in_flight += samples
        request.token_on_device |= samples

    def _chunk(self, missing: int) -> int:
        threshold = self.config.long_prefill_token_threshold
        if 0 < threshold < missing and len(self.requests) > 1:
            return threshold
        return missing

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Gives the request blocks for its first num_tokens; False (no change) if short."""
        fresh = self._num_blocks(num_tokens) - len(request.block_ids)
        if fresh > self.pool.num_free:
            return False
        if fresh > 0:
            request.block_ids += self.pool.take(fresh)
        return True

    def _victim(self) -> Request:
        if self.config.policy == "priority":
            return max(self.running, key=lambda request: request.key)
        return self.running[-1]

    def _preempt(self, request: Request) -> None:
        """Takes blocks and slot from a request already removed from `running`; it waits again."""
        self._release(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.waiting.add_front(request)

    def _end(self, request: Request, reason: FinishReason) -> None:
        if request.status is RequestStatus.RUNNING:
            self._release(request)
        else:
            self.waiting.remove(request)
        self._forget(request, reason)

    def _forget(self, request: Request, reason: FinishReason) -> None:
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self.requests[request.request_id]
        self.num_host_bound -= request.needs_host_tokens

    def _release(self, request: Request) -> None:
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_registered_blocks = 0
        self._free_slots.append(request.slot)
        request.slot = -1

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)
