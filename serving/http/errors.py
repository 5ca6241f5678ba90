"""Errors as OpenAI clients know them: `{"error": {message, type, param, code}}`."""

import logging
import re
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.errors import CapacityError, ParameterError
from jaxllm.text.errors import ChatMessageError, ChatTemplateError, PromptError, TextError
from serving.errors import (
    ControlError,
    EngineDeadError,
    NotReadyError,
    OverloadedError,
    RequestFailedError,
    RequestRefusedError,
    ServingError,
)
from serving.http.json_response import JsonResponse

logger = logging.getLogger(__name__)

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestEntityTooLargeError",
    415: "UnsupportedMediaTypeError",
    422: "UnprocessableEntityError",
    431: "RequestHeaderFieldsTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}
_CONTROL_FAULTS = {"argument": 400, "denied": 403, "missing": 404, "state": 409}
_MAX_MESSAGE = 1000
# Clients repeat requests that failed with 500. One that breaks the engine would do so again.
_NO_RETRY = {"x-should-retry": "false"}
_PATH = re.compile(r"\$\.(\w+)")


class ClientLeftError(Exception):
    """The client closed the connection; nobody is there to answer."""


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
      status: of HTTP.
      param: the field of the request that is at fault.
      headers: to send along.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        self.status = status
        self.message = message
        self.param = param
        self.headers = headers or {}
        super().__init__(message)


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param)


def as_api_error(error: Exception) -> ApiError:
    """The answer to any exception; one that nobody foresaw is logged and says nothing."""
    match error:
        case ApiError():
            return error
        case TimeoutError():
            return ApiError(504, "the request took too long")
        case ParameterError():
            return bad_request(str(error), error.field)
        case msgspec.ValidationError():
            found = _PATH.search(str(error))
            return bad_request(str(error), found[1] if found else None)
        case msgspec.DecodeError():
            return bad_request(f"the body is no valid JSON: {error}")
        case ChatMessageError() | ChatTemplateError():
            return bad_request(str(error), "messages")
        case PromptError():
            return bad_request(str(error), "prompt")
        case TextError() | CapacityError() | RequestRefusedError():
            return bad_request(str(error))
        case OverloadedError():
            return ApiError(503, str(error), headers={"Retry-After": str(error.retry_after)})
        case NotReadyError():
            return ApiError(503, str(error), headers={"Retry-After": "5"})
        case ControlError():
            return ApiError(_CONTROL_FAULTS.get(error.fault, 500), str(error))
        case EngineDeadError():
            return ApiError(500, f"{error}; the request is lost", headers=_NO_RETRY)
        case RequestFailedError():
            return ApiError(500, "the engine could not finish this request", headers=_NO_RETRY)
        case HTTPException():
            headers = dict(error.headers or {})
            return ApiError(error.status_code, str(error.detail), headers=headers)
    logger.error("a request could not be served", exc_info=error)
    return ApiError(500, "internal error; the server's log says more")


def error_body(error: ApiError) -> dict[str, Any]:
    message = error.message
    if len(message) > _MAX_MESSAGE:
        message = message[:_MAX_MESSAGE] + "..."
    return {
        "error": {
            "message": message,
            "type": _TYPES.get(error.status, "APIError"),
            "param": error.param,
            "code": error.status,
        }
    }


def error_response(error: ApiError) -> JsonResponse:
    return JsonResponse(error_body(error), error.status, error.headers)


async def handle_exception(request: Request, error: Exception) -> Response:
    """Starlette's handler for every exception of a route."""
    if isinstance(error, ClientLeftError):
        return Response(status_code=499)
    return error_response(as_api_error(error))


# Starlette looks for the nearest base class; what only Exception covers it would also raise anew.
EXCEPTION_HANDLERS: dict[Any, Any] = dict.fromkeys(
    (
        HTTPException,
        TimeoutError,
        ClientLeftError,
        ApiError,
        ServingError,
        msgspec.MsgspecError,
        ValueError,
        Exception,
    ),
    handle_exception,
)
