"""Bar 4, and clients that vanish: what they asked for ends, and its blocks are free."""

import asyncio
import time

from benchmarks.reliability.harness import (
    COMPLETIONS,
    GREEDY,
    Check,
    Options,
    Server,
    bar,
    percentile,
    request,
    running,
    together,
)

LONG = {"prompt": "Hello there", "max_tokens": 400, "stream": True, **GREEDY}


def _time_to_free(server: Server) -> float:
    """Seconds from the end of a connection to free blocks."""

    async def leave() -> float:
        await request(server.address, "POST", COMPLETIONS, LONG, stop_after=3)
        return time.monotonic()

    left = asyncio.run(leave())
    while True:
        counts = server.blocks()
        if not counts["used"] + counts["shared"]:
            return time.monotonic() - left


@bar("4", "a client that leaves")
def leaving(options: Options) -> list[Check]:
    with running("--max-num-seqs=16") as server:
        seconds = [_time_to_free(server) for _ in range(100)]
        step = server.metric("vllm:inter_token_latency_seconds_sum") / max(
            1.0, server.metric("vllm:inter_token_latency_seconds_count")
        )

        async def many() -> None:
            for _ in range(20):
                await together(server.address, [LONG] * 50, stop_after=2)

        asyncio.run(many())
        wrong = server.idle_faults()
        counts = server.blocks()
        aborted = server.metric("vllm:request_success_total", finished_reason="abort")
        return [
            Check(
                "p99 from the end of the connection to free blocks",
                1000 * percentile(seconds, 99),
                "ms",
                100 + 1000 * step,
            ),
            Check("aborts counted of 1100", aborted, "", 1100, at_least=True),
            Check("blocks leaked", counts["used"] + counts["shared"], "", 0),
            Check("idle invariants broken afterwards", len(wrong), "", 0),
        ]


@bar("vanish", "300 clients vanish at once")
def vanishing(options: Options) -> list[Check]:
    with running("--max-num-seqs=16") as server:

        async def vanish() -> float:
            work = [
                asyncio.ensure_future(request(server.address, "POST", COMPLETIONS, LONG))
                for _ in range(300)
            ]
            await asyncio.sleep(3.0)
            for each in work:
                each.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            return time.monotonic()

        left = asyncio.run(vanish())
        wrong = server.idle_faults(20)
        seconds = time.monotonic() - left
        tokens = server.complete(max_tokens=2, **GREEDY)["usage"]["completion_tokens"]
        return [
            Check("until nothing runs or waits", seconds, "s", 5),
            Check("idle invariants broken afterwards", len(wrong), "", 0),
            Check("tokens of the next request", tokens, "", 2, at_least=True),
        ]
