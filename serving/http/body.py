"""Reading the body of a request within limits."""

import asyncio
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.types import Receive

from serving.http.errors import ApiError, bad_request

MAX_NESTING = 64
# A body over the limit is read on up to this factor of it, since a client that still writes
# would not see the answer.
_PATIENCE = 8
_CHUNK_SECONDS = 30.0
# Longer ones are decoded in a thread, so that others are served meanwhile.
_LONG_BODY = 64 * 1024


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body.

    Raises:
      ApiError: 413 above `limit` bytes, 408 if the client stops sending, 400 if it leaves.
    """
    body = bytearray()
    size = 0
    receive: Receive = request.receive
    while True:
        try:
            message = await asyncio.wait_for(receive(), _CHUNK_SECONDS)
        except TimeoutError:
            raise ApiError(408, "the body did not come", headers={"Connection": "close"}) from None
        if message["type"] == "http.disconnect":
            raise bad_request("the client left")
        chunk = message.get("body", b"")
        size += len(chunk)
        if size <= limit:
            body += chunk
        else:
            body.clear()
        if not message.get("more_body", False) or size > limit * _PATIENCE:
            break
    if size > limit:
        raise ApiError(
            413,
            f"the body has more than {limit} bytes (max_body_size)",
            headers={"Connection": "close"},
        )
    return bytes(body)


async def decode_body[T](request: Request, kind: type[T], limit: int) -> T:
    """The body as a `kind`.

    Raises:
      ApiError: it does not call itself JSON, is too large, or too deeply nested.
      msgspec.DecodeError: it is no JSON, or of wrong types.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        # Read all the same, so that the connection can be used again.
        await read_body(request, limit)
        raise bad_request(f"content type {content_type!r}: must be application/json")
    body = await read_body(request, limit)
    if len(body) > _LONG_BODY:
        return await asyncio.to_thread(_decode, body, kind)
    return _decode(body, kind)


def _decode[T](body: bytes, kind: type[T]) -> T:
    check_nesting(body)
    try:
        return msgspec.json.decode(body, type=kind)
    except (RecursionError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is no valid JSON: {error}") from None


def check_nesting(body: bytes) -> None:
    """Raises ApiError for JSON nested deeper than MAX_NESTING; linear in the body."""
    if body.count(b"[") + body.count(b"{") <= MAX_NESTING:
        return
    # Without escapes every quote begins or ends a string.
    text = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    outside = ~np.logical_xor.accumulate(text == ord('"'))
    # This bit is what "[" and "{" differ in, and "]" and "}".
    brackets = text | np.uint8(0x20)
    steps = (brackets == ord("{")).astype(np.int8) - (brackets == ord("}"))
    if np.cumsum(steps * outside, dtype=np.int32).max() > MAX_NESTING:
        raise bad_request(f"the body is nested deeper than {MAX_NESTING} levels")


def to_plain(value: Any) -> Any:
    """Structs as dicts, without the fields that are None."""
    plain = msgspec.to_builtins(value)
    if isinstance(plain, dict):
        return {key: to_plain(item) for key, item in plain.items() if item is not None}
    if isinstance(plain, list):
        return [to_plain(item) for item in plain]
    return plain
