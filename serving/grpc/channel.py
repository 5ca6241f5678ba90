"""Methods of a channel by name, and when to call them again."""

import random
from typing import Any

import grpc

from serving.grpc import messages as pb
from serving.grpc.requests import RequestError

_FIRST_WAIT = 0.1
_LONGEST_WAIT = 5.0


class Methods:
    """A channel's methods by "Service/Method"."""

    def __init__(self, channel: Any, api_key: str | None):
        self._channel = channel
        self.metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._methods: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._methods:
            service, _, method_name = name.partition("/")
            method = pb.DESCRIPTOR.services_by_name[service].methods_by_name[method_name]
            make = self._channel.unary_unary
            if method.client_streaming:
                make = self._channel.stream_unary
            elif method.server_streaming:
                make = self._channel.unary_stream
            self._methods[name] = make(
                f"/{method.containing_service.full_name}/{method.name}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=getattr(pb, method.output_type.name).FromString,
            )
        return self._methods[name]


def seconds_to_wait(error: Any, attempt: int, retries: int) -> float:
    """Before the next attempt: doubled each time, and spread.

    Raises:
      RequestError: there is no next attempt.
    """
    if error.code() is not grpc.StatusCode.UNAVAILABLE or attempt >= retries:
        raise as_request_error(error) from None
    return min(_LONGEST_WAIT, _FIRST_WAIT * 2**attempt) * random.uniform(0.5, 1.5)


def as_request_error(error: Any) -> RequestError:
    return RequestError(error.code(), error.details() or "")
