"""Bar 3: /livez answers at once, under full load and while programs are compiled."""

import asyncio
import tempfile
import time

from benchmarks.reliability.harness import (
    GREEDY,
    Check,
    Options,
    Server,
    bar,
    percentile,
    request,
    running,
)
from benchmarks.reliability.streams import measure, result

_LOAD_SECONDS = 10.0
_PAUSE = 0.02


async def _probe(server: Server, until: "asyncio.Future[object] | float") -> list[float]:
    seconds: list[float] = []
    end = time.monotonic() + (until if isinstance(until, float) else 600.0)
    while time.monotonic() < end and not (isinstance(until, asyncio.Future) and until.done()):
        seconds.append((await request(server.address, "GET", "/livez")).seconds)
        await asyncio.sleep(_PAUSE)
    return seconds


@bar("3", "/livez under load and during compilation")
def probes(options: Options) -> list[Check]:
    with (
        tempfile.TemporaryDirectory() as empty,
        running("--max-num-seqs=32", f"--compilation-cache-dir={empty}", wait=False) as server,
    ):

        async def compiling() -> list[float]:
            ready = asyncio.ensure_future(asyncio.to_thread(server.wait_ready))
            return await _probe(server, ready)

        async def loaded() -> list[float]:
            body = {"prompt": "Hello", "max_tokens": 400, "stream": True, **GREEDY}
            load = measure(server.address, body, streams=32, seconds=_LOAD_SECONDS + 2.0)
            await asyncio.sleep(2.0)
            seconds = await _probe(server, _LOAD_SECONDS)
            await asyncio.to_thread(result, load)
            return seconds

        cold = asyncio.run(compiling())
        busy = asyncio.run(loaded())
        return [
            Check("p99 while programs are compiled", 1000 * percentile(cold, 99), "ms", 250),
            Check("p99 with 32 streams", 1000 * percentile(busy, 99), "ms", 50),
            server.idle_check(),
        ]
