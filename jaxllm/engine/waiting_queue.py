"""Waiting queues: first come first served, or by priority. No operation is O(length)."""

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from jaxllm.engine.request import Request


class WaitingQueue(Protocol):
    """Requests that wait for admission."""

    def add(self, request: Request) -> None:
        """Adds a new request."""

    def add_front(self, request: Request) -> None:
        """Puts a preempted request back, before every request that came after it."""

    def peek(self) -> Request:
        """The request to admit next; IndexError when empty."""

    def pop(self) -> Request:
        """Takes the request that peek shows."""

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FcfsQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def add_front(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        if not self._requests:
            raise IndexError("no request waits")
        return next(iter(self._requests.values()))

    def pop(self) -> Request:
        request = self.peek()
        del self._requests[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))


class PriorityQueue:
    """Smallest priority value first, ties by arrival.

    Removed requests stay in the heap until they surface.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], Request]] = []
        self._members: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        self._members[request.request_id] = request
        heapq.heappush(self._heap, (request.key, request))

    add_front = add

    def peek(self) -> Request:
        self._drop_removed()
        if not self._heap:
            raise IndexError("no request waits")
        return self._heap[0][1]

    def pop(self) -> Request:
        request = self.peek()
        heapq.heappop(self._heap)
        del self._members[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        del self._members[request.request_id]

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._members.values(), key=lambda request: request.key))

    def _drop_removed(self) -> None:
        while self._heap and self._heap[0][1].request_id not in self._members:
            heapq.heappop(self._heap)
