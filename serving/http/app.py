"""The ASGI application."""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from serving.http.chat import chat_route
from serving.http.completions import completions_route
from serving.http.context import ServerContext
from serving.http.errors import EXCEPTION_HANDLERS
from serving.http.middleware import Authentication, Bookkeeping, Door, HeaderRules, RootPath
from serving.http.openapi import openapi_routes
from serving.http.page import page_routes
from serving.http.responses import responses_route
from serving.http.small_routes import small_routes
from serving.http.watch_routes import watch_routes
from serving.tracing import TraceRequests


def make_app(
    context: ServerContext, keys: tuple[str, ...], more_routes: Sequence[BaseRoute] = ()
) -> ASGIApp:
    """The application of a server whose API any of `keys` opens (none: it is open)."""
    generating = [
        Route("/v1/completions", completions_route(context), methods=["POST"]),
        Route("/v1/chat/completions", chat_route(context), methods=["POST"]),
        Route("/v1/responses", responses_route(context), methods=["POST"]),
    ]
    middleware = [
        Middleware(HeaderRules),
        Middleware(RootPath, root_path=context.settings.root_path),
        Middleware(Bookkeeping, context=context),
        Middleware(Authentication, keys=keys),
        Middleware(Door, llm=context.llm, routes=generating),
    ]
    if context.tracing is not None:
        middleware.insert(2, Middleware(TraceRequests, tracing=context.tracing))
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
            *generating,
            *small_routes(context),
            *watch_routes(context),
            *openapi_routes(context),
            *page_routes(context),
            *more_routes,
        ],
        middleware=middleware,
        exception_handlers=EXCEPTION_HANDLERS,
    )
