"""Bars 5 and 6, and a thousand requests in a second: what is refused, what is served, how soon."""

import asyncio
import time

from benchmarks.reliability.harness import (
    COMPLETIONS,
    GREEDY,
    Check,
    Options,
    Reply,
    Server,
    bar,
    percentile,
    request,
    running,
    together,
)

_BODY = {"prompt": "Hello", "max_tokens": 16, **GREEDY}


def _checks(server: Server, found: list[Reply | BaseException], most_ms: float) -> list[Check]:
    replies = [each for each in found if isinstance(each, Reply)]
    served = [each for each in replies if each.status == 200]
    refused = [each for each in replies if each.status in (429, 503)]
    honest = [each for each in refused if "retry-after" in each.headers]
    rejections = [each.seconds for each in refused]
    return [
        Check("without an answer", len(found) - len(replies), "", 0),
        Check("other answers", len(replies) - len(served) - len(refused), "", 0),
        Check("refused without Retry-After", len(refused) - len(honest), "", 0),
        Check("p99 of a refusal", 1000 * percentile(rejections, 99), "ms", most_ms),
        Check("served", len(served), "", 64, at_least=True),
        server.idle_check(),
    ]


@bar("5", "2,000 requests at once, 64 may wait")
def burst(options: Options) -> list[Check]:
    with running("--max-num-seqs=16", "--max-num-queued-reqs=64") as server:
        found = asyncio.run(together(server.address, [_BODY] * 2000, timeout=120))
        return _checks(server, found, 200)


@bar("thousand", "1,000 requests within a second, 64 may wait")
def thousand(options: Options) -> list[Check]:
    async def spread(server: Server) -> list[Reply | BaseException]:
        async def later(delay: float) -> Reply:
            await asyncio.sleep(delay)
            return await request(server.address, "POST", COMPLETIONS, _BODY, timeout=120)

        work = [later(i / 1000) for i in range(1000)]
        return await asyncio.gather(*work, return_exceptions=True)

    with running("--max-num-seqs=16", "--max-num-queued-reqs=64") as server:
        return _checks(server, asyncio.run(spread(server)), 1000)


@bar("6", "goodput at ten times the capacity")
def goodput(options: Options) -> list[Check]:
    # 8 places, 20 steps of 20 ms a request: 20 requests a second.
    body = {**_BODY, "max_tokens": 20}
    capacity, seconds = 20.0, 10.0

    async def offer(server: Server, rate: float) -> float:
        work = []
        began = time.monotonic()
        while (now := time.monotonic()) < began + seconds:
            due = int((now - began) * rate) + 1
            while len(work) < due:
                work.append(
                    asyncio.ensure_future(request(server.address, "POST", COMPLETIONS, body))
                )
            await asyncio.sleep(0.005)
        found = await asyncio.gather(*work, return_exceptions=True)
        served = sum(isinstance(each, Reply) and each.status == 200 for each in found)
        return served / (time.monotonic() - began)

    flags = ("--max-num-seqs=8", "--max-num-queued-reqs=16")
    with running(*flags, stub={"step_seconds": 0.02}) as server:
        normal = asyncio.run(offer(server, capacity))
        heavy = asyncio.run(offer(server, 10 * capacity))
        return [
            Check("goodput at capacity", normal, "requests/s", 0.5 * capacity, at_least=True),
            Check("share of it at ten times", 100 * heavy / normal, "%", 90, at_least=True),
            server.idle_check(),
        ]
