"""Which replica serves a request."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from jaxllm.errors import ConfigError
from jaxllm.planning.trace import TraceRequest


class Router(Protocol):
    """Chooses a replica for each request, in order of arrival.

    Attributes:
      needs_loads: whether `choose` looks at the loads; replicas run apart where it does not.
    """

    needs_loads: bool

    def choose(self, request: TraceRequest, loads: Sequence[int]) -> int:
        """Index of the replica; loads are the requests each one holds now."""


class RoundRobin:
    """One after the other."""

    needs_loads = False

    def __init__(self, num_replicas: int):
        self.num_replicas = num_replicas
        self._next = 0

    def choose(self, request: TraceRequest, loads: Sequence[int]) -> int:
        chosen = self._next
        self._next = (chosen + 1) % self.num_replicas
        return chosen


class LeastLoaded:
    """The replica with the fewest requests, the first of several."""

    needs_loads = True

    def __init__(self, num_replicas: int):
        self.num_replicas = num_replicas

    def choose(self, request: TraceRequest, loads: Sequence[int]) -> int:
        return min(range(self.num_replicas), key=loads.__getitem__)


class PrefixAware:
    """A replica that has seen the prefix, unless it is overloaded; else the least loaded one.

    Overloaded is a load above `slack` requests more than `ratio` times the least load. The prefix
    then gets a further home, so a popular one spreads over as many replicas as it needs.
    """

    needs_loads = True

    def __init__(self, num_replicas: int, ratio: float = 1.5, slack: int = 8):
        self.num_replicas = num_replicas
        self.ratio = ratio
        self.slack = slack
        self._homes: dict[str, list[int]] = {}

    def choose(self, request: TraceRequest, loads: Sequence[int]) -> int:
        least = min(range(self.num_replicas), key=loads.__getitem__)
        if request.prefix is None:
            return least
        homes = self._homes.setdefault(request.prefix, [])
        if homes:
            best = min(homes, key=loads.__getitem__)
            if loads[best] <= self.ratio * loads[least] + self.slack:
                return best
        if least not in homes:
            homes.append(least)
        return least


ROUTERS: Mapping[str, Callable[[int], Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-aware": PrefixAware,
}


def make_router(name: str, num_replicas: int) -> Router:
    """A router by its name in ROUTERS.

    Raises:
      ConfigError: the name is not known.
    """
    if name not in ROUTERS:
        raise ConfigError(f"router={name!r}: one of {', '.join(ROUTERS)}")
    return ROUTERS[name](num_replicas)
