"""Limits on connections that uvicorn has not: slow headers, peers that vanished or do not read."""

import asyncio
import functools
import socket
from typing import Any

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 30.0
# A reader that takes nothing for so long is given up.
STALL_SECONDS = 60.0
# Seconds idle, seconds between probes, probes: a peer that vanished is noticed after a minute.
_KEEPALIVE = (30, 10, 3)
# Bytes that the kernel, and this process, take beyond what is on its way: what a slow reader leaves
# lying is merged instead of written out. A fast reader never waits for more.
_UNSENT_BYTES = 16 * 1024
# The extension of a scope that writes a part of the body past all layers: `(bytes) -> bool`.
WRITE_PART = "jaxllm.write_part"


class _OneWrite:
    """What one answer is written to: its head goes out together with what follows it.

    uvicorn writes a head just before the first part of its body, so that it does not wait long.
    """

    __slots__ = ("_held", "_passes", "_transport")

    def __init__(self, transport: Any):
        self._transport = transport
        self._held = b""
        self._passes = False

    def write(self, data: bytes) -> None:
        if self._passes:
            self._transport.write(data)
        elif not self._held and not data.startswith(b"HTTP/1.1 1"):
            self._held = data
        else:
            self._flush(data)

    def close(self) -> None:
        self._flush(b"")
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _flush(self, data: bytes) -> None:
        held, self._held = self._held, b""
        self._passes = self._passes or bool(held)
        if held or data:
            self._transport.write(held + data)


class GuardedProtocol(H11Protocol):
    """Closes a connection whose next request does not arrive whole within HEADER_SECONDS.

    One whose peer takes nothing of an answer for STALL_SECONDS is dropped with what it was sent.
    """

    _header_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._served_app = self.app
        self.app = self._serve

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.cycle.transport = _OneWrite(self.transport)  # type: ignore[assignment]
        if scope["http_version"] == "1.1" and scope["method"] != "HEAD":
            write = functools.partial(self._write_part, self.cycle)
            scope["extensions"] = {WRITE_PART: write}
        await self._served_app(scope, receive, send)

    def _write_part(self, cycle: Any, data: bytes) -> bool:
        """Writes a part of a chunked body; False where it must go the usual way, which waits.

        The layers of ASGI and h11 cost several times what framing a chunk does, and a stream has a
        part per token.
        """
        if (
            cycle.flow.write_paused
            or cycle.disconnected
            or cycle.response_complete
            or not cycle.response_started
            or not data
            or self.conn.our_state is not h11.SEND_BODY
        ):
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_UNSENT_BYTES)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_NOTSENT_LOWAT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
            names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
            for name, value in zip(names, _KEEPALIVE, strict=True):
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._start_header_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_header_timer()
        elif self._header_timer is None:
            self._start_header_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._stop_stall_timer()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._stop_stall_timer()
        super().connection_lost(exc)

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self._too_slow)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _too_slow(self) -> None:
        self._header_timer = None
        busy = self.cycle is not None and not self.cycle.response_complete
        if not busy and not self.transport.is_closing():
            self.transport.close()

    def _watch_reader(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(STALL_SECONDS, self._check_reader, unread)

    def _check_reader(self, unread: int) -> None:
        self._stall_timer = None
        if self.transport.get_write_buffer_size() < unread:
            self._watch_reader()
        else:
            # Closing would wait for the reader.
            self.transport.abort()

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
