"""JSON answers, encoded by msgspec; text that has no UTF-8 form is replaced."""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

_ENCODER = msgspec.json.Encoder()


def encode(value: Any) -> bytes:
    return _ENCODER.encode(value)


class JsonResponse(Response):
    media_type = "application/json"

    def __init__(self, content: Any, status: int = 200, headers: Mapping[str, str] | None = None):
        super().__init__(encode(content), status, headers)
