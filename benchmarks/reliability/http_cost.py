"""Bar 20: what the API process itself costs, with an engine that takes no time to think."""

import time

from benchmarks.reliability.harness import (
    GREEDY,
    Check,
    Options,
    bar,
    percentile,
    running,
)
from benchmarks.reliability.streams import measure, result

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
        client = measure(server.address, body, streams=_STREAMS, skip=3.0, seconds=4.0)
        time.sleep(3.0)
        began, cpu = time.monotonic(), _cpu_seconds(server.process.pid)
        tokens = server.metric("vllm:generation_tokens_total")
        scrapes = []
        while time.monotonic() < began + 4.0:
            scrapes.append(server.get("/metrics").seconds)
            time.sleep(0.5)
        used = _cpu_seconds(server.process.pid) - cpu
        events = server.metric("vllm:generation_tokens_total") - tokens
        seconds = time.monotonic() - began
        found = result(client)
        late = found.gaps[1] - _STEP
        return [
            Check("events per second of the API process's CPU", events / used, "/s", 10_000, True),
            Check("events per second", events / seconds, "/s", 0.9 * _STREAMS / _STEP, True),
            Check("p99 of a gap beyond the engine's step", 1000 * late, "ms", 20),
            Check("p99 of a scrape of /metrics", 1000 * percentile(scrapes, 99), "ms", 50),
            Check("streams that finished", found.finished, "", _STREAMS, at_least=True),
            server.idle_check(),
        ]
