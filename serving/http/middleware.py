"""What wraps every request: API keys, metrics, load, request ids; plain ASGI."""

import secrets
import time
from collections.abc import Sequence

from starlette._utils import get_route_path
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.api_keys import ApiKeys, given_key
from serving.async_llm import AsyncLLM
from serving.errors import ServingError
from serving.http.context import ServerContext
from serving.http.errors import ApiError, as_api_error, error_response

# Open without a key; everything else is closed, known or not.
OPEN_PATHS = frozenset(
    {"/health", "/livez", "/readyz", "/ping", "/version", "/metrics", "/openapi.json", "/"}
)
MAX_HEADERS = 100
_CLOSE = {"Connection": "close"}
_NOT_MEASURED = frozenset(
    {"/metrics", "/health", "/livez", "/readyz", "/load", "/ping", "/version", "/server_info"}
)


class HeaderRules:
    """Refuses very many headers (their bytes the protocol limits), and two lengths of one body."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = _header_fault(scope["headers"]) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error_response(error)(scope, receive, send)


def _header_fault(headers: list[tuple[bytes, bytes]]) -> ApiError | None:
    if len(headers) > MAX_HEADERS:
        return ApiError(431, f"more than {MAX_HEADERS} headers")
    names = {name for name, _ in headers}
    if b"transfer-encoding" in names and b"content-length" in names:
        # A proxy that believes the other one sees another request in the rest.
        return ApiError(
            400, "Transfer-Encoding and Content-Length exclude each other", None, _CLOSE
        )
    return None


class Authentication:
    """Demands one of the API keys on every path but the open ones."""

    def __init__(
        self, app: ASGIApp, keys: tuple[str, ...], open_paths: frozenset[str] = OPEN_PATHS
    ):
        self._app = app
        self._open_paths = open_paths
        self._keys = ApiKeys(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or not self._keys
            or scope["method"] == "OPTIONS"
            or get_route_path(scope) in self._open_paths
        ):
            await self._app(scope, receive, send)
            return
        key = given_key(scope["headers"])
        if key in self._keys:
            scope["api_key"] = key
            await self._app(scope, receive, send)
            return
        error = ApiError(401, "an API key is needed", headers={"WWW-Authenticate": "Bearer"})
        await error_response(error)(scope, receive, send)


class RootPath:
    """Tells the routes of the prefix that a proxy may leave on paths."""

    def __init__(self, app: ASGIApp, root_path: str):
        self._app = app
        self._root_path = root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            if path == self._root_path or path.startswith(self._root_path + "/"):
                scope["root_path"] = self._root_path
        await self._app(scope, receive, send)


class Bookkeeping:
    """Counts requests, and adds the request id to answers if asked to."""

    def __init__(self, app: ASGIApp, context: ServerContext):
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = self._context
        path = get_route_path(scope)
        status = 499
        began = time.monotonic()

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if context.settings.enable_request_id_headers:
                    given = dict(scope["headers"]).get(b"x-request-id", b"")
                    request_id = given or secrets.token_hex(16).encode()
                    message.setdefault("headers", []).append((b"x-request-id", request_id))
            await send(message)

        generates = path.startswith("/v1/") and scope["method"] == "POST"
        context.server_load += generates
        try:
            await self._app(scope, receive, noting)
        finally:
            context.server_load -= generates
            if path not in _NOT_MEASURED:
                # Paths that no route has would make a series each.
                handler = getattr(scope.get("route"), "path", "none")
                method = scope["method"] if scope["method"] in _METHODS else "other"
                metrics = context.llm.metrics
                metrics.http_requests.labels(handler, method, f"{status // 100}xx").inc()
                metrics.http_seconds.labels(handler, method).observe(time.monotonic() - began)


class Door:
    """Refuses what could not be let in now, before any work is spent on it.

    Args:
      routes: that generate.
    """

    def __init__(self, app: ASGIApp, llm: AsyncLLM, routes: Sequence[Route]):
        self._app = app
        self._llm = llm
        self._routes = {route.path: route for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            route = self._routes.get(get_route_path(scope))
            if route is not None:
                try:
                    self._llm.check_door()
                except ServingError as error:
                    # Requests are counted by route.
                    scope["route"] = route
                    await error_response(as_api_error(error))(scope, receive, send)
                    return
        await self._app(scope, receive, send)


_METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})
