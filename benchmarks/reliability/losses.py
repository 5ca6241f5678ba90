"""Bars 9 to 11: either process is killed, or the engine is stopped, while streams run."""

import asyncio
import os
import signal
import time

from benchmarks.reliability.harness import (
    GREEDY,
    Check,
    Options,
    Reply,
    Server,
    bar,
    is_alive,
    launch,
    running,
    together,
    wait_for,
)

_STREAM = {"prompt": "Hello", "max_tokens": 400, "stream": True, **GREEDY}
_WHOLE = {"prompt": "Hello", "max_tokens": 400, **GREEDY}


async def _kill(server: Server) -> tuple[float, int]:
    """(seconds until every client knows, clients that got no error)."""
    work = asyncio.ensure_future(together(server.address, [_STREAM, _STREAM, _WHOLE, _WHOLE]))
    await asyncio.sleep(0.15)
    os.kill(server.engine(), signal.SIGKILL)
    began = time.monotonic()
    found = await work
    seconds = time.monotonic() - began
    told = sum(
        isinstance(each, Reply) and b'"error"' in each.body and not each.broken for each in found
    )
    return seconds, len(found) - told


@bar("9", "kill -9 of the engine in mid-stream")
def engine_killed(options: Options) -> list[Check]:
    began = time.monotonic()
    with running("--max-num-seqs=8", f"--restart-engine={options.repeats}") as server:
        warm = time.monotonic() - began
        told, silent, back = 0.0, 0, 0.0
        for _ in range(options.repeats):
            seconds, without = asyncio.run(_kill(server))
            told, silent = max(told, seconds), silent + without
            back = max(back, wait_for(server.is_ready, 60, server.process))
            server.complete(max_tokens=2)
        return [
            Check("slowest error to a client", told, "s", 1),
            Check("clients without an error", silent, "", 0),
            Check(f"slowest return of {options.repeats}", back, "s", warm + 2),
            server.idle_check(),
        ]


@bar("10", "kill -9 of the API process")
def api_killed(options: Options) -> list[Check]:
    slowest, orphans = 0.0, 0
    for repeat in range(options.repeats):
        # One in five with the real engine: its threads and its device are what differs.
        stub = None if repeat % 5 == 4 else {"step_seconds": 0.01}
        server = launch("--max-num-seqs=8", stub=stub)
        engine = server.engine()
        server.end(signal.SIGKILL)
        try:
            seconds = wait_for(lambda pid=engine: not is_alive(pid), 10)  # type: ignore[misc]
        except TimeoutError:
            seconds, orphans = 10.0, orphans + 1
            os.kill(engine, signal.SIGKILL)
        slowest = max(slowest, seconds)
    return [
        Check(f"slowest end of the engine of {options.repeats}", slowest, "s", 2),
        Check("engines left", orphans, "", 0),
    ]


@bar("11", "SIGSTOP of the engine in mid-stream")
def engine_stopped(options: Options) -> list[Check]:
    with running("--max-num-seqs=8") as server:

        async def stop() -> tuple[float, float, int]:
            work = asyncio.ensure_future(together(server.address, [_STREAM] * 4))
            await asyncio.sleep(0.1)
            engine = server.engine()
            os.kill(engine, signal.SIGSTOP)
            red = await asyncio.to_thread(wait_for, lambda: not server.is_ready(), 30)
            os.kill(engine, signal.SIGCONT)
            green = await asyncio.to_thread(wait_for, server.is_ready, 30)
            found = await work
            return red, green, sum(isinstance(e, Reply) and e.finished for e in found)

        red, green, whole = asyncio.run(stop())
        return [
            Check("until /readyz is 503", red, "s", 12),
            Check("until it is 200 again", green, "s", 2),
            Check("streams that finished all the same", whole, "", 4, at_least=True),
            server.idle_check(),
        ]
