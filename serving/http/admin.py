"""Control over HTTP: routes with vLLM's names, on a listener of their own."""

from collections.abc import Awaitable, Callable
from typing import Annotated

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from serving.errors import ControlError
from serving.http.body import decode_body
from serving.http.context import ServerContext
from serving.http.errors import EXCEPTION_HANDLERS, bad_request
from serving.http.json_response import JsonResponse
from serving.http.middleware import Authentication, HeaderRules
from serving.http.small_routes import server_info_route

_MAX_IDS = 10_000
_LEVELS = ("1", "2")


class AbortRequest(msgspec.Struct, kw_only=True):
    """POST /abort_requests: the ids of answers."""

    request_ids: Annotated[list[str], msgspec.Meta(max_length=_MAX_IDS)]


def make_admin_app(context: ServerContext, keys: tuple[str, ...]) -> ASGIApp:
    """The application behind `--admin-port` or `--admin-uds`; `keys` open it, none: it is open."""
    llm = context.llm

    async def is_paused(request: Request) -> Response:
        return JsonResponse({"is_paused": llm.paused})

    async def reset_prefix_cache(request: Request) -> Response:
        preempt = _flag(request, "reset_running_requests")
        name = "preempt_and_reset_prefix_cache" if preempt else "reset_prefix_cache"
        return JsonResponse({"done": bool(await llm.call(name))})

    async def sleep(request: Request) -> Response:
        level = request.query_params.get("level", "1")
        if level not in _LEVELS:
            raise bad_request(f"one of {', '.join(_LEVELS)}", "level")
        await llm.weights.sleep(int(level), request.query_params.get("mode", "refuse"))
        return Response(status_code=200)

    async def wake_up(request: Request) -> Response:
        tags = request.query_params.getlist("tags") or None
        await llm.weights.wake_up(tags)
        if tags is None and llm.weights.is_sleeping:
            raise ControlError(
                "the weights were dropped by sleep at level 2: send others over gRPC "
                "(UpdateWeights), or start the server anew",
                "state",
            )
        return Response(status_code=200)

    async def is_sleeping(request: Request) -> Response:
        return JsonResponse({"is_sleeping": llm.weights.is_sleeping})

    async def abort_requests(request: Request) -> Response:
        body = await decode_body(request, AbortRequest, context.settings.max_body_size)
        return JsonResponse({"aborted": llm.abort_requests(body.request_ids)})

    return Starlette(
        routes=[
            Route("/pause", _plain(llm.pause), methods=["POST"]),
            Route("/resume", _plain(llm.resume), methods=["POST"]),
            Route("/is_paused", is_paused, methods=["GET"]),
            Route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"]),
            Route("/sleep", sleep, methods=["POST"]),
            Route("/wake_up", wake_up, methods=["POST"]),
            Route("/is_sleeping", is_sleeping, methods=["GET"]),
            Route("/abort_requests", abort_requests, methods=["POST"]),
            Route("/server_info", server_info_route(context), methods=["GET"]),
        ],
        middleware=[
            Middleware(HeaderRules),
            Middleware(Authentication, keys=keys, open_paths=frozenset()),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
    )


def _plain(work: Callable[[], Awaitable[None]]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        await work()
        return Response(status_code=200)

    return endpoint


def _flag(request: Request, name: str) -> bool:
    value = request.query_params.get(name, "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise bad_request("true or false", name)
    return value in ("true", "1")
