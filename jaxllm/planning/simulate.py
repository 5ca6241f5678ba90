"""The simulator: a trace, a router, and replicas of the real scheduler on a virtual clock."""

import contextlib
import dataclasses
import functools
import heapq
import itertools
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from jaxllm.engine.scheduler import SchedulerConfig
from jaxllm.errors import CapacityError, ConfigError
from jaxllm.planning.device import SimulatedRequest
from jaxllm.planning.replica import Records, Replica, ReplicaConfig
from jaxllm.planning.results import SimulationResult
from jaxllm.planning.router import Router, make_router
from jaxllm.planning.step_time import StepTimeModel
from jaxllm.planning.trace import TraceRequest
from jaxllm.planning.usage import Usage
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
    processes: int = 1,
) -> SimulationResult:
    """Runs a trace to its end.

    Every request ends exactly once, or is refused at its arrival, as the engine would: a prompt
    that leaves no room for a token below max_model_len, or a request that can never fit the pool.

    Args:
      trace: requests in order of arrival.
      model: seconds of a step.
      processes: how many share the work where the router does not look at loads; the results do
        not depend on it.

    Raises:
      ConfigError: the trace is empty or out of order, the router is not known, or processes is
        not positive.
    """
    if not trace:
        raise ConfigError("the trace holds no requests")
    if any(a.arrival > b.arrival for a, b in itertools.pairwise(trace)):
        raise ConfigError("the trace is not in order of arrival")
    if processes < 1:
        raise ConfigError(f"processes={processes}: at least 1")
    began = time.perf_counter()
    router = make_router(config.router, config.num_replicas)
    if router.needs_loads:
        records, usages = _run_together(trace, config, model, router)
    else:
        shares: list[list[tuple[int, TraceRequest]]] = [[] for _ in range(config.num_replicas)]
        for index, entry in enumerate(trace):
            shares[router.choose(entry, ())].append((index, entry))
        records, usages = _run_apart(shares, len(trace), config, model, processes)
    limit = config.scheduler.max_model_len
    return SimulationResult.of(trace, limit, records, usages, time.perf_counter() - began)


def _run_together(
    trace: Sequence[TraceRequest], config: SimulationConfig, model: StepTimeModel, router: Router
) -> tuple[Records, list[Usage]]:
    """All replicas on one clock, brought up to each arrival so that their loads are known."""
    records = Records(len(trace))
    replicas = [_replica(config, model, records, i) for i in range(config.num_replicas)]
    maker = _RequestMaker(config)
    # (when its next step can begin, index) of every replica with requests.
    busy: list[tuple[float, int]] = []
    is_busy = [False] * config.num_replicas
    for index, entry in enumerate(trace):
        arrival = entry.arrival
        while busy and busy[0][0] < arrival:
            _, i = heapq.heappop(busy)
            replicas[i].run_until(arrival)
            is_busy[i] = replicas[i].has_unfinished
            if is_busy[i]:
                heapq.heappush(busy, (replicas[i].now, i))
        chosen = router.choose(entry, [replica.load(arrival) for replica in replicas])
        _submit(replicas[chosen], maker, index, entry)
        if replicas[chosen].has_unfinished and not is_busy[chosen]:
            is_busy[chosen] = True
            heapq.heappush(busy, (replicas[chosen].now, chosen))
    return records, [_finish(replica) for replica in replicas]


def _run_apart(
    shares: Sequence[list[tuple[int, TraceRequest]]],
    num_requests: int,
    config: SimulationConfig,
    model: StepTimeModel,
    processes: int,
) -> tuple[Records, list[Usage]]:
    """Each replica's share of the trace by itself, in several processes if there is a choice."""
    jobs = [
        (config, model, num_requests, dict(enumerate(shares[first::processes])), first, processes)
        for first in range(min(processes, len(shares)))
    ]
    if len(jobs) == 1:
        return _run_shares(*jobs[0])
    records = Records(num_requests)
    usages: dict[int, Usage] = {}
    with ProcessPoolExecutor(len(jobs), multiprocessing.get_context("spawn")) as pool:
        for first, (found, used) in enumerate(pool.map(_run_job, jobs)):
            records.merge(found)
            usages |= {first + i * processes: usage for i, usage in enumerate(used)}
    return records, [usages[i] for i in range(len(shares))]


type _Job = tuple[
    SimulationConfig, StepTimeModel, int, dict[int, list[tuple[int, TraceRequest]]], int, int
]


def _run_job(job: _Job) -> tuple[Records, list[Usage]]:
    return _run_shares(*job)


def _run_shares(
    config: SimulationConfig,
    model: StepTimeModel,
    num_requests: int,
    shares: dict[int, list[tuple[int, TraceRequest]]],
    first: int,
    step: int,
) -> tuple[Records, list[Usage]]:
    """Replicas first, first + step, ... one after the other."""
    records = Records(num_requests)
    maker = _RequestMaker(config)
    usages = []
    for i, share in shares.items():
        replica = _replica(config, model, records, first + i * step)
        for index, entry in share:
            replica.run_until(entry.arrival)
            _submit(replica, maker, index, entry)
        usages.append(_finish(replica))
    return records, usages


def _replica(
    config: SimulationConfig, model: StepTimeModel, records: Records, index: int
) -> Replica:
    replica_config = ReplicaConfig(
        config.scheduler,
        config.num_blocks,
        config.enable_prefix_caching,
        config.async_scheduling,
        config.fast_forward,
    )
    return Replica(replica_config, model, records, index)


def _submit(replica: Replica, maker: "_RequestMaker", index: int, entry: TraceRequest) -> None:
    request = maker.make(index, entry)
    if request is not None:
        # A request that can never fit stays marked as refused.
        with contextlib.suppress(CapacityError):
            replica.submit(request, entry.arrival)


def _finish(replica: Replica) -> Usage:
    replica.run_until(float("inf"))
    replica.core.scheduler.pool.check()
    return replica.usage


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
