"""The ASGI application."""

from collections.abc import Sequence

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from serving.errors import ServingError
from serving.http.chat import chat_route
from serving.http.completions import completions_route
from serving.http.context import ServerContext
from serving.http.errors import ApiError, error_response, handle_exception
from serving.http.middleware import Authentication, Bookkeeping, RootPath
from serving.http.page import page_routes
from serving.http.small_routes import small_routes
from serving.http.streaming import ClientLeftError


def make_app(
    context: ServerContext, keys: tuple[str, ...], more_routes: Sequence[BaseRoute] = ()
) -> ASGIApp:
    """The application of a server whose API any of `keys` opens (none: it is open)."""
    middleware = [
        Middleware(RootPath, root_path=context.settings.root_path),
        Middleware(Bookkeeping, context=context),
        Middleware(Authentication, keys=keys),
    ]
    if context.settings.allowed_origins:
        middleware.insert(
            0,
            Middleware(
                CORSMiddleware,
                allow_origins=list(context.settings.allowed_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["authorization", "content-type", "x-request-id"],
            ),
        )
    return Starlette(
        routes=[
            Route("/v1/completions", completions_route(context), methods=["POST"]),
            Route("/v1/chat/completions", chat_route(context), methods=["POST"]),
            *small_routes(context),
            *page_routes(context),
            *more_routes,
        ],
        middleware=middleware,
        exception_handlers={
            HTTPException: handle_exception,
            TimeoutError: _handle_timeout,
            ClientLeftError: _handle_left,
            ApiError: handle_exception,
            ServingError: handle_exception,
            msgspec.MsgspecError: handle_exception,
            # Errors of parameters and text.
            ValueError: handle_exception,
            Exception: handle_exception,
        },
    )


async def _handle_timeout(request: Request, error: Exception) -> Response:
    return error_response(ApiError(504, "the request took too long"))


async def _handle_left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
