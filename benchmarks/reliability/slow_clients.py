"""Bars 14 and 15: clients that read slowly, and connections that never ask."""

import asyncio
import contextlib
import json
import socket
import time

from benchmarks.reliability.harness import (
    COMPLETIONS,
    GREEDY,
    Check,
    Options,
    Server,
    bar,
    request,
    running,
)
from benchmarks.reliability.streams import measure, result

_STEP = 0.02
_SLOW_CLIENTS = 50
_FAST = {"prompt": "Hello", "max_tokens": 300, "stream": True, **GREEDY}
# Logprobs make a stream of many bytes.
_SLOW = {**_FAST, "max_tokens": 450, "logprobs": 20}


async def _read_slowly(server: Server, end: float) -> None:
    """Takes 1 kB a second."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    with contextlib.closing(sock):
        await loop.sock_connect(sock, server.address)
        body = json.dumps(_SLOW).encode()
        head = (
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        await loop.sock_sendall(sock, head.encode() + body)
        while time.monotonic() < end:
            await loop.sock_recv(sock, 1024)
            await asyncio.sleep(1.0)


async def _beside(server: Server, slow: int, seconds: float) -> tuple[float, int]:
    """(p99 of the gaps of 4 streams, growth of the server's memory) beside slow readers."""
    end = time.monotonic() + seconds
    before = server.rss()
    work = [asyncio.ensure_future(_read_slowly(server, end)) for _ in range(slow)]
    client = measure(server.address, _FAST, streams=4, skip=1.0, seconds=seconds - 8)
    found = await asyncio.to_thread(result, client)
    grown = server.rss() - before
    await asyncio.gather(*work, return_exceptions=True)
    return found.gaps[1], grown


@bar("14", "50 clients that read 1 kB a second")
def slow_readers(options: Options) -> list[Check]:
    # Blocks for all of them: a preempted stream would say nothing about readers.
    flags = ("--max-num-seqs=64", "--num-blocks=8000")
    with running(*flags, stub={"step_seconds": _STEP, "quick": True}) as server:
        baseline, _ = asyncio.run(_beside(server, 0, 14.0))
        p99, grown = asyncio.run(_beside(server, _SLOW_CLIENTS, 20.0))
        return [
            Check("p99 gap of other streams over that without them", p99 / baseline, "", 1.3),
            Check("memory a slow client takes", grown / _SLOW_CLIENTS / 2**20, "MiB", 1),
            server.idle_check(),
        ]


@bar("15", "500 half-open connections")
def half_open(options: Options) -> list[Check]:
    with running("--max-num-seqs=8") as server:

        async def hold() -> tuple[float, int, int]:
            held = []
            for i in range(500):
                reader, writer = await asyncio.open_connection(*server.address)
                writer.write(b"" if i % 2 else b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A")
                held.append((reader, writer))
            began = time.monotonic()
            ends = asyncio.gather(*(reader.read() for reader, _ in held))
            closed = asyncio.create_task(asyncio.wait_for(ends, 60))
            tried = served = 0
            while not closed.done():
                tried += 1
                reply = await request(
                    server.address, "POST", COMPLETIONS, {"prompt": "x", "max_tokens": 2}
                )
                served += reply.status == 200
                await asyncio.sleep(0.2)
            seconds = time.monotonic() - began
            for _, writer in held:
                writer.close()
            await closed
            return seconds, tried, served

        seconds, tried, served = asyncio.run(hold())
        return [
            Check("until all are closed", seconds, "s", 35),
            Check("requests not served meanwhile", tried - served, f"of {tried}", 0),
            server.idle_check(),
        ]
