"""Bars 16 and 17: memory, descriptors and compilations over minutes of mixed traffic."""

import asyncio
import random
import time

from benchmarks.reliability.harness import (
    COMPLETIONS,
    Check,
    Options,
    Server,
    bar,
    request,
    running,
)

_CLIENTS = 8
# The allocator and the caches fill up first.
_WARM_SHARE = 0.4


async def _client(server: Server, end: float, chance: random.Random) -> int:
    """Requests of all kinds, one after the other; how many got a 5xx or nothing."""
    lost = 0
    while time.monotonic() < end:
        kind = chance.random()
        body: dict[str, object] = {
            "prompt": "x" * chance.randrange(1, 200),
            "max_tokens": chance.randrange(1, 60),
            "temperature": chance.choice([0, 0.7, 1]),
        }
        stop_after = None
        if kind < 0.15:
            body["temperature"] = 7
        elif kind < 0.4:
            body["stream"], stop_after = True, 3
        elif kind < 0.6:
            body |= {"stream": True, "logprobs": 2}
        elif kind < 0.7:
            body |= {"n": 3, "temperature": 1, "stop": ["e"]}
        elif kind < 0.8:
            body["structured_outputs"] = {"choice": ["red", "green", f"{chance.random()}"]}
        try:
            reply = await request(server.address, "POST", COMPLETIONS, body, stop_after=stop_after)
            lost += reply.status >= 500
        except (OSError, TimeoutError):
            lost += 1
    return lost


def _slope(points: list[tuple[float, float]]) -> float:
    """Of the line of least squares."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    above = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return above / max(1e-9, sum((x - mean_x) ** 2 for x, _ in points))


@bar("16", "soak: mixed traffic with aborts and errors")
def soak(options: Options) -> list[Check]:
    seconds = 60 * options.minutes
    with running("--max-num-seqs=16") as server:
        server.complete(max_tokens=2)
        fds = server.num_fds()

        async def run() -> tuple[int, list[tuple[float, float, int]]]:
            began = time.monotonic()
            work = [
                asyncio.ensure_future(_client(server, began + seconds, random.Random(i)))
                for i in range(_CLIENTS)
            ]
            samples = []
            while time.monotonic() < began + seconds:
                await asyncio.sleep(1.0)
                samples.append((time.monotonic() - began, server.rss() / 2**20, server.num_fds()))
            return sum(await asyncio.gather(*work)), samples

        lost, samples = asyncio.run(run())
        warm = [each for each in samples if each[0] > min(300.0, _WARM_SHARE * seconds)]
        slope = 600 * _slope([(at, rss) for at, rss, _ in warm])
        wrong = server.idle_faults()
        # In a short soak what the heap still learns weighs more than a leak.
        limit = 1.0 if options.minutes >= 30 else 30.0
        return [
            Check(f"memory over 10 minutes, after {warm[0][0]:.0f} s", slope, "MiB", limit),
            Check("descriptors more than before", server.num_fds() - fds, "", 0),
            Check("requests lost", lost, "", 0),
            Check("compilations", server.metric("jaxllm:recompilations_total"), "", 0),
            Check("idle invariants broken afterwards (bar 17)", len(wrong), "", 0),
        ]
