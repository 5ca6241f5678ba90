"""Routes that show what the engine does: the block map and the diagnosis."""

import asyncio
import dataclasses
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from serving.diagnose import Diagnosis, Sample, parse
from serving.engine.block_map import STATES
from serving.http.context import ServerContext
from serving.http.errors import bad_request
from serving.http.json_response import JsonResponse
from serving.http.streaming import until_disconnect

MAX_SECONDS = 60.0
MAX_QUEUE_TARGET = 3600.0


def watch_routes(context: ServerContext) -> list[Route]:
    """Both of them."""
    llm = context.llm

    latest: asyncio.Task[dict[str, Any]] | None = None

    async def look() -> dict[str, Any]:
        runs: list[tuple[str, int]] = await llm.call("block_runs")
        totals = dict.fromkeys(STATES, 0)
        for state, count in runs:
            totals[state] += count
        return {"block_size": llm.description.block_size, "counts": totals, "runs": runs}

    async def blocks(request: Request) -> Response:
        nonlocal latest
        # The engine looks at every block, so those who ask meanwhile share an answer.
        if latest is None or latest.done():
            latest = asyncio.create_task(look())
        return JsonResponse(await asyncio.shield(latest))

    async def sample() -> Sample:
        page = llm.metrics.render().decode()
        return await asyncio.to_thread(parse, page)

    async def watch(seconds: float, queue_target: float) -> dict[str, Any]:
        before = await sample()
        await asyncio.sleep(seconds)
        findings = Diagnosis(before, await sample(), queue_target).findings()
        return {"seconds": seconds, "findings": [dataclasses.asdict(each) for each in findings]}

    async def diagnose(request: Request) -> Response:
        llm.check_ready()
        seconds = _number(request, "seconds", 5.0, MAX_SECONDS)
        target = _number(request, "queue_target", 1.0, MAX_QUEUE_TARGET)
        return JsonResponse(await until_disconnect(request, watch(seconds, target)))

    return [
        Route("/blocks", blocks, methods=["GET"]),
        Route("/diagnose", diagnose, methods=["GET"]),
    ]


def _number(request: Request, name: str, default: float, most: float) -> float:
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= most:
        raise bad_request(f"a number from 0 to {most:g}", name)
    return value
