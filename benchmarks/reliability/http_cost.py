"""Bar 20: what the API process itself costs, with an engine that takes no time to think."""

import asyncio
import time

from benchmarks.reliability.harness import (
    GREEDY,
    Check,
    Options,
    Reply,
    bar,
    gaps,
    percentile,
    request,
    running,
    together,
)

_STREAMS = 200
_STEP = 0.02


def _cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


@bar("20", "200 streams of 50 tokens a second")
def http_cost(options: Options) -> list[Check]:
    flags = (f"--max-num-seqs={_STREAMS}", "--max-num-batched-tokens=8192", "--num-blocks=8000")
    with running(*flags, stub={"step_seconds": _STEP, "quick": True}) as server:
        body = {"prompt": "Hello", "max_tokens": 400, "stream": True, **GREEDY}

        async def measure() -> tuple[float, float, list[float], list[float]]:
            work = asyncio.ensure_future(together(server.address, [body] * _STREAMS))
            await asyncio.sleep(3.0)
            began, cpu = time.monotonic(), _cpu_seconds(server.process.pid)
            tokens = await _generated(server.address)
            scrapes = []
            while time.monotonic() < began + 4.0:
                scrapes.append((await request(server.address, "GET", "/metrics")).seconds)
                await asyncio.sleep(0.5)
            used = _cpu_seconds(server.process.pid) - cpu
            events = await _generated(server.address) - tokens
            end = time.monotonic()
            found = await work
            late = [
                gap - _STEP
                for reply in found
                if isinstance(reply, Reply)
                for gap, at in zip(gaps(reply), reply.times[1:], strict=True)
                if began < at < end
            ]
            return events / used, events / (end - began), late, scrapes

        per_core, rate, late, scrapes = asyncio.run(measure())
        return [
            Check("events per second of the API process's CPU", per_core, "/s", 10_000, True),
            Check("events per second", rate, "/s", 0.9 * _STREAMS / _STEP, True),
            Check("p99 of a gap beyond the engine's step", 1000 * percentile(late, 99), "ms", 20),
            Check("p99 of a scrape of /metrics", 1000 * percentile(scrapes, 99), "ms", 50),
            server.idle_check(),
        ]


async def _generated(address: tuple[str, int]) -> float:
    page = (await request(address, "GET", "/metrics")).body.decode()
    line = next(x for x in page.splitlines() if x.startswith("vllm:generation_tokens_total{"))
    return float(line.rpartition(" ")[2])
