"""The OpenAPI description of the routes, made from the types of their bodies."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from serving.http.context import ServerContext
from serving.http.json_response import JsonResponse
from serving.http.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from serving.http.responses_protocol import ResponsesRequest
from serving.http.watch_routes import MAX_QUEUE_TARGET, MAX_SECONDS
from serving.version import VERSION

_BODIES: dict[str, tuple[type, str]] = {
    "/v1/completions": (CompletionRequest, "Continue prompts"),
    "/v1/chat/completions": (ChatRequest, "Answer a conversation"),
    "/v1/responses": (ResponsesRequest, "Answer with items; nothing is kept"),
    "/tokenize": (TokenizeRequest, "Token ids of a prompt or of a conversation"),
    "/detokenize": (DetokenizeRequest, "Text of token ids"),
}
_READS: dict[str, str] = {
    "/v1/models": "The models served",
    "/tokenizer_info": "Special tokens and the chat template",
    "/server_info": "Limits and defaults in force",
    "/load": "Open requests",
    "/blocks": "Use of the KV blocks",
    "/diagnose": "Known troubles, with the numbers",
    "/health": "Whether requests are served",
    "/ping": "Whether requests are served",
    "/readyz": "Whether requests are served, and why not",
    "/livez": "Whether the process runs",
    "/version": "The version",
    "/metrics": "Prometheus metrics",
}
_PARAMETERS: dict[str, dict[str, float]] = {
    "/diagnose": {"seconds": MAX_SECONDS, "queue_target": MAX_QUEUE_TARGET},
}
_NO_JSON = frozenset({"/health", "/ping", "/livez"})
_EVENTS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses"})
_ERRORS = {
    "400": "The request is at fault",
    "401": "No valid API key",
    "404": "No such model",
    "408": "The body did not come",
    "413": "The body is too large",
    "431": "Too many headers",
    "500": "The engine lost the request",
    "503": "Not taken now: starting, ending or overloaded",
    "504": "The request took too long",
}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "integer"},
            },
        }
    },
}


def openapi() -> dict[str, Any]:
    """The document, OpenAPI 3.1."""
    bodies = [body for body, _ in _BODIES.values()]
    references, schemas = msgspec.json.schema_components(
        bodies, ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, Any] = {}
    for (path, (_, summary)), reference in zip(_BODIES.items(), references, strict=True):
        content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
        if path in _EVENTS:
            content["text/event-stream"] = {"schema": {"type": "string"}}
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": reference}},
                },
                "responses": _responses({"description": "Done", "content": content}),
            }
        }
    for path, summary in _READS.items():
        done: dict[str, Any] = {"description": "Done"}
        if path == "/metrics":
            done["content"] = {"text/plain": {"schema": {"type": "string"}}}
        elif path not in _NO_JSON:
            done["content"] = {"application/json": {"schema": {"type": "object"}}}
        parameters = [
            {
                "name": name,
                "in": "query",
                "schema": {"type": "number", "minimum": 0, "maximum": most},
            }
            for name, most in _PARAMETERS.get(path, {}).items()
        ]
        operation = {"summary": summary, "responses": _responses(done)}
        paths[path] = {"get": {**operation, **({"parameters": parameters} if parameters else {})}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxllm", "version": VERSION},
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Error": _ERROR_SCHEMA},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        # Keys are needed where the server was started with some.
        "security": [{}, {"key": []}],
    }


def openapi_routes(context: ServerContext) -> list[Route]:
    """The route that tells the document."""
    document = openapi()

    async def describe(request: Request) -> Response:
        return JsonResponse(document)

    return [Route("/openapi.json", describe, methods=["GET"])]


def _responses(done: dict[str, Any]) -> dict[str, Any]:
    error = {"schema": {"$ref": "#/components/schemas/Error"}}
    return {
        "200": done,
        **{
            status: {"description": text, "content": {"application/json": error}}
            for status, text in _ERRORS.items()
        },
    }
