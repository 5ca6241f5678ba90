"""The simulator: a trace, a router, and replicas of the real scheduler on a virtual clock."""

import dataclasses
import functools
import heapq
import itertools
import time
from collections.abc import Callable, Sequence

from jaxllm.engine.scheduler import SchedulerConfig
from jaxllm.errors import CapacityError, ConfigError
from jaxllm.planning.device import SimulatedRequest
from jaxllm.planning.replica import Records, Replica, ReplicaConfig
from jaxllm.planning.results import SimulationResult
from jaxllm.planning.router import make_router
from jaxllm.planning.step_time import StepTimeModel
from jaxllm.planning.trace import TraceRequest
from jaxllm.sampling_params import SamplingParams

MOST_REPLICAS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class SimulationConfig:
    """A deployment: equal replicas behind a router.

    Attributes:
      num_blocks: P of each replica, the null block included.
      num_replicas: 1 to 64.
      router: a name in router.ROUTERS.
      async_scheduling: as in the engine; the simulation then takes several times longer.
      fast_forward: play runs of decode steps forward; the results do not depend on it.
    """

    scheduler: SchedulerConfig
    num_blocks: int
    num_replicas: int = 1
    router: str = "round-robin"
    enable_prefix_caching: bool = True
    async_scheduling: bool = False
    fast_forward: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.num_replicas <= MOST_REPLICAS:
            raise ConfigError(f"num_replicas={self.num_replicas}: 1 to {MOST_REPLICAS}")
        if self.num_blocks < 2:
            raise ConfigError(f"num_blocks={self.num_blocks}: at least 2")
        if self.scheduler.max_num_batched_tokens < self.scheduler.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.scheduler.max_num_batched_tokens} is below "
                f"max_num_seqs={self.scheduler.max_num_seqs}"
            )


def simulate(
    trace: Sequence[TraceRequest],
    config: SimulationConfig,
    model: StepTimeModel,
    progress: Callable[[int], None] | None = None,
) -> SimulationResult:
    """Runs a trace to its end.

    Every request ends exactly once, or is refused at its arrival, as the engine would: a prompt
    that leaves no room for a token below max_model_len, or a request that can never fit the pool.

    Args:
      trace: requests in order of arrival.
      model: seconds of a step.
      progress: called with the number of requests that have arrived, now and then.

    Raises:
      ConfigError: the trace is empty or out of order, or the router is not known.
    """
    if not trace:
        raise ConfigError("the trace holds no requests")
    if any(a.arrival > b.arrival for a, b in itertools.pairwise(trace)):
        raise ConfigError("the trace is not in order of arrival")
    began = time.perf_counter()
    records = Records(len(trace))
    replica_config = ReplicaConfig(
        config.scheduler,
        config.num_blocks,
        config.enable_prefix_caching,
        config.async_scheduling,
        config.fast_forward,
    )
    replicas = [Replica(replica_config, model, records, i) for i in range(config.num_replicas)]
    maker = _RequestMaker(config)
    router = make_router(config.router, config.num_replicas)
    busy: list[tuple[float, int]] = []
    waiting_for = set()
    for index, entry in enumerate(trace):
        arrival = entry.arrival
        loads: Sequence[int] = ()
        if router.needs_loads:
            while busy and busy[0][0] < arrival:
                _, i = heapq.heappop(busy)
                replicas[i].run_until(arrival)
                if replicas[i].has_unfinished:
                    heapq.heappush(busy, (replicas[i].now, i))
                else:
                    waiting_for.discard(i)
            loads = [replica.load(arrival) for replica in replicas]
        chosen = router.choose(entry, loads)
        replica = replicas[chosen]
        if not router.needs_loads:
            replica.run_until(arrival)
        request = maker.make(index, entry)
        if request is not None:
            try:
                replica.submit(request, arrival)
            except CapacityError:
                pass
            else:
                if router.needs_loads and chosen not in waiting_for:
                    waiting_for.add(chosen)
                    heapq.heappush(busy, (replica.now, chosen))
        if progress is not None and index % 1024 == 0:
            progress(index)
    for replica in replicas:
        replica.run_until(float("inf"))
        replica.core.scheduler.pool.check()
    if progress is not None:
        progress(len(trace))
    return SimulationResult.of(
        trace, config.scheduler.max_model_len, records, replicas, time.perf_counter() - began
    )


class _RequestMaker:
    """Engine requests from those of a trace.

    Hashes of prompts are stand-ins that are equal exactly where the tokens would be: a block wholly
    within a shared prefix has the hash of the prefix and its place, every other block one of its
    own. Hashing tokens would be most of the simulation's work.
    """

    def __init__(self, config: SimulationConfig):
        self._max_model_len = config.scheduler.max_model_len
        self._block_size = config.scheduler.block_size
        self._caching = config.enable_prefix_caching
        self._prefixes: dict[str, int] = {}
        self._params = functools.cache(_length_params)

    def make(self, index: int, entry: TraceRequest) -> SimulatedRequest | None:
        """The request; None where its prompt leaves no room for a token."""
        if entry.prompt_tokens >= self._max_model_len:
            return None
        hashes: list[bytes] = []
        if self._caching:
            total = min(entry.prompt_tokens + entry.output_tokens, self._max_model_len)
            shared = entry.prefix_tokens // self._block_size if entry.prefix is not None else 0
            if shared:
                key = self._prefixes.setdefault(str(entry.prefix), len(self._prefixes))
                base = (1 << 62) + (key << 24)
                hashes = [(base + i).to_bytes(8) for i in range(shared)]
            base = index << 24
            hashes += [(base + i).to_bytes(8) for i in range(shared, total // self._block_size)]
        return SimulatedRequest(
            index,
            entry.prompt_tokens,
            self._params(entry.output_tokens),
            self._max_model_len,
            hashes,
        )


def _length_params(output_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
