"""Answers over time: server-sent events, and the client that leaves."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from serving.http.errors import ClientLeftError
from serving.http.guard import WRITE_PART
from serving.http.json_response import encode

DONE = b"data: [DONE]\n\n"
PING_SECONDS = 15.0


def event(data: Any) -> bytes:
    return b"data: " + encode(data) + b"\n\n"


async def until_disconnect[T](request: Request, work: Awaitable[T], timeout: float = 0.0) -> T:
    """The result of `work`, which is cancelled when the client leaves.

    Raises:
      ClientLeftError: it left.
      TimeoutError: `timeout` seconds have passed (0: no limit).
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait(
            {task, watch}, timeout=timeout or None, return_when=asyncio.FIRST_COMPLETED
        )
        if task.done():
            return task.result()
        if watch.done():
            raise ClientLeftError
        raise TimeoutError
    finally:
        for future in (task, watch):
            if not future.done():
                future.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await future


class EventStream:
    """An answer of server-sent events.

    Args:
      first: events that are ready.
      events: the others; it is closed when the answer ends, however it ends.
    """

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes],
        *,
        headers: dict[str, str] | None = None,
        timeout: float = 0.0,
    ):
        self._first = first
        self._events = events
        self._timeout = timeout
        self._quiet = True
        self._headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *((k.lower().encode(), v.encode("latin-1")) for k, v in (headers or {}).items()),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Another server than ours has no such extension.
        write = scope.get("extensions", {}).get(WRITE_PART, _cannot)
        writer = asyncio.ensure_future(self._write(send, write))
        watch = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({writer, watch}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
        finally:
            for future in (writer, watch):
                if not future.done():
                    future.cancel()
                    with contextlib.suppress(asyncio.CancelledError, Exception):
                        await future
            await self._events.aclose()

    async def _write(self, send: Send, write: Callable[[bytes], bool]) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self._headers}
        await send(start)
        await self._send(send, self._first)
        ping = asyncio.ensure_future(self._ping(send))
        try:
            async with asyncio.timeout(self._timeout or None):
                async for data in self._events:
                    self._quiet = False
                    if not write(data):
                        await self._send(send, data)
        except TimeoutError:
            error = {"message": "the request took too long", "type": "GatewayTimeoutError"}
            await self._send(send, event({"error": {**error, "param": None, "code": 504}}))
        finally:
            ping.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _ping(self, send: Send) -> None:
        """Comments keep proxies from closing a stream in which nothing happens."""
        while True:
            self._quiet = True
            await asyncio.sleep(PING_SECONDS)
            if self._quiet:
                await send({"type": "http.response.body", "body": b": ping\n\n", "more_body": True})


def _cannot(data: bytes) -> bool:
    return False


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
