"""Bars 7 and 8: how the server ends, under load and while it starts."""

import asyncio
import json
import signal
import tempfile
import time

from benchmarks.reliability.harness import (
    COMPLETIONS,
    GREEDY,
    Check,
    Options,
    Reply,
    Server,
    bar,
    is_alive,
    launch,
    request,
    running,
    together,
    wait_for,
)

_STREAM = {"prompt": "Hello", "max_tokens": 300, "stream": True, **GREEDY}
# 300 steps of 10 ms: the streams need about 3 s after the signal.
_SLOW = {"step_seconds": 0.01}


async def _drain(server: Server, streams: int) -> tuple[list[Reply | BaseException], float, int]:
    """(the streams, seconds until not ready, status of a new request)."""
    work = asyncio.ensure_future(together(server.address, [_STREAM] * streams))
    while json.loads((await request(server.address, "GET", "/load")).body)["server_load"] < streams:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    server.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    while (await request(server.address, "GET", "/readyz")).status == 200:
        await asyncio.sleep(0.002)
    red = time.monotonic() - began
    late = await request(server.address, "POST", COMPLETIONS, _STREAM)
    return await work, red, late.status


@bar("7", "SIGTERM with 8 streams")
def draining(options: Options) -> list[Check]:
    with running("--shutdown-timeout=20", stub=_SLOW) as server:
        found, red, late = asyncio.run(_drain(server, 8))
        last = time.monotonic()
        code = server.process.wait(10)
        seconds = time.monotonic() - last
        whole = sum(isinstance(each, Reply) and each.finished for each in found)
        return [
            Check("broken streams", 8 - whole, "", 0),
            Check("until /readyz is 503", 1000 * red, "ms", 100),
            Check("status of a new request", late, "", 503, at_least=True),
            Check("from the last token to the exit", seconds, "s", 1),
            Check("exit code", code, "", 0),
        ]


@bar("sigterm-load", "SIGTERM with 64 requests, half of them waiting")
def draining_queue(options: Options) -> list[Check]:
    flags = ("--shutdown-timeout=30", "--max-num-seqs=32")
    with running(*flags, stub=_SLOW) as server:
        found, _, _ = asyncio.run(_drain(server, 64))
        code = server.process.wait(20)
        whole = sum(isinstance(each, Reply) and each.finished for each in found)
        return [Check("broken streams", 64 - whole, "", 0), Check("exit code", code, "", 0)]


def _second_signal(server: Server, number: signal.Signals) -> tuple[float, int]:
    """(seconds to the exit, children left) of a second signal while streams run."""
    engine = server.engine()

    async def load() -> None:
        work = asyncio.ensure_future(together(server.address, [_STREAM] * 4))
        await asyncio.sleep(0.5)
        server.process.send_signal(number)
        await asyncio.sleep(0.2)
        server.process.send_signal(number)
        await work

    began = time.monotonic()
    asyncio.run(load())
    server.process.wait(10)
    seconds = time.monotonic() - began - 0.7
    time.sleep(0.1)
    return seconds, int(is_alive(engine))


def _signal_during_start(number: signal.Signals) -> tuple[float, int]:
    """(seconds to the exit, children left) of one signal while programs are compiled."""
    with tempfile.TemporaryDirectory() as empty:
        server = launch(f"--compilation-cache-dir={empty}", wait=False)
        return _signal_while_compiling(server, number)


def _signal_while_compiling(server: Server, number: signal.Signals) -> tuple[float, int]:
    wait_for(lambda: server.get("/livez").status == 200, 30, server.process)
    engine = server.engine()
    time.sleep(2.0)
    began = time.monotonic()
    server.end(number)
    seconds = time.monotonic() - began
    time.sleep(0.1)
    return seconds, int(is_alive(engine))


@bar("8", "a second signal, and one during compilation")
def signals(options: Options) -> list[Check]:
    checks = []
    for number in (signal.SIGTERM, signal.SIGINT):
        with running("--shutdown-timeout=60", stub={"step_seconds": 0.05}) as server:
            seconds, left = _second_signal(server, number)
        checks += [
            Check(f"second {number.name}: exit", seconds, "s", 2),
            Check(f"second {number.name}: children left", left, "", 0),
        ]
        seconds, left = _signal_during_start(number)
        checks += [
            Check(f"{number.name} during compilation: exit", seconds, "s", 2),
            Check(f"{number.name} during compilation: children left", left, "", 0),
        ]
    return checks
