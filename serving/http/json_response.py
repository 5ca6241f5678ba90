"""JSON answers, encoded by msgspec; text that has no UTF-8 form is replaced."""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

_ENCODER = msgspec.json.Encoder()


def encode(value: Any) -> bytes:
    return _ENCODER.encode(value)


class TextTemplate:
    """Encodes a value again and again with another text in it.

    Args:
      value: has MARK where the text comes.
    """

    MARK = "\0"
    __slots__ = ("_after", "_before")

    def __init__(self, value: Any):
        self._before, mark, self._after = encode(value).rpartition(encode(self.MARK))
        if not mark:
            raise ValueError("no mark in the value")

    def encode(self, text: str) -> bytes:
        return b"%b%b%b" % (self._before, _ENCODER.encode(text), self._after)


class JsonResponse(Response):
    media_type = "application/json"

    def __init__(self, content: Any, status: int = 200, headers: Mapping[str, str] | None = None):
        super().__init__(encode(content), status, headers)
