"""The load generator: closed loop, open loop, or both."""

import asyncio
import time
from collections.abc import Callable, Sequence

import aiohttp
import numpy as np

from serving.bench.client import Target, new_session, send
from serving.bench.datasets import BenchRequest
from serving.bench.timeline import Timeline


async def run_load(
    target: Target,
    requests: Sequence[BenchRequest],
    arrivals: np.ndarray,
    *,
    max_concurrency: int | None = None,
    num_warmups: int = 0,
    request_id_prefix: str = "bench-",
    on_done: Callable[[], object] = lambda: None,
) -> tuple[list[Timeline], float]:
    """Sends every request when its time has come and a place is free.

    Args:
      arrivals: seconds after the start, ascending, one per request; zeros make a closed loop.
      max_concurrency: most requests that are open at once, None for no limit. A request that waits
        for a place is timed from when it gets one; the wait is its `queue`.
      num_warmups: requests sent before, of the first one's kind, which count nowhere.
      on_done: called after each request.

    Returns:
      A timeline per request, in their order, and the duration in seconds.
    """
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    async with new_session(target.insecure) as session:
        if num_warmups:
            warm = [
                _one(session, target, requests[0], f"{request_id_prefix}warmup-{i}", places)
                for i in range(num_warmups)
            ]
            await asyncio.gather(*warm)
        began = time.perf_counter()
        tasks = []
        for index, (request, arrival) in enumerate(zip(requests, arrivals, strict=True)):
            # The clock of the whole run, so that delays do not add up.
            delay = began + float(arrival) - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            work = _one(session, target, request, f"{request_id_prefix}{index}", places)
            task = asyncio.create_task(work)
            task.add_done_callback(lambda _: on_done())
            tasks.append(task)
        timelines = await asyncio.gather(*tasks)
        return timelines, time.perf_counter() - began


async def _one(
    session: aiohttp.ClientSession,
    target: Target,
    request: BenchRequest,
    request_id: str,
    places: asyncio.Semaphore | None,
) -> Timeline:
    if places is None:
        return await send(session, target, request, request_id)
    arrived = time.perf_counter()
    async with places:
        waited = time.perf_counter() - arrived
        timeline = await send(session, target, request, request_id)
        timeline.queue = waited
        return timeline
