"""Keeps streams open until it is ended: `python -m benchmarks.reliability.load HOST PORT STREAMS`.

In a process of its own it leaves the probes of another one their own event loop.
"""

import asyncio
import sys

from benchmarks.reliability.harness import COMPLETIONS, GREEDY, request

_BODY = {"prompt": "Hello", "max_tokens": 400, "stream": True, **GREEDY}


async def _stream(address: tuple[str, int]) -> None:
    while True:
        await request(address, "POST", COMPLETIONS, _BODY)


async def _run(address: tuple[str, int], streams: int) -> None:
    await asyncio.gather(*(_stream(address) for _ in range(streams)))


if __name__ == "__main__":
    asyncio.run(_run((sys.argv[1], int(sys.argv[2])), int(sys.argv[3])))
