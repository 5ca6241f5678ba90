"""Listening sockets, and uvicorn with our limits."""

import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from jaxllm.errors import ConfigError
from serving.http.guard import GuardedProtocol

MAX_HEADER_BYTES = 64 * 1024
# Settings of uvicorn.Config for every listener.
LIMITS: dict[str, Any] = {
    "http": GuardedProtocol,
    "ws": "none",
    "lifespan": "off",
    "log_config": None,
    "h11_max_incomplete_event_size": MAX_HEADER_BYTES,
    # Connections accepted in a turn of the event loop: others wait for no more than these, and
    # where descriptors have run out asyncio logs each one it tried.
    "backlog": 64,
    "timeout_keep_alive": 75,
    "timeout_graceful_shutdown": 4,
    "server_header": False,
}
_BACKLOG = 4096


class Server(uvicorn.Server):
    """uvicorn without its own signal handling; as many connections as ever may wait."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(_BACKLOG)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def allow_descriptors(count: int) -> None:
    """Lets this process open `count` files, or as many as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def listen(host: str, port: int, uds: str | None = None, *, private: bool = False) -> socket.socket:
    """A listening socket.

    Args:
      uds: path of a unix socket, in place of host and port.
      private: only this user may connect to that.

    Raises:
      ConfigError: the address is in use or not ours.
    """
    if uds is not None:
        path = Path(uds)
        if path.is_socket():
            path.unlink()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        address: str | tuple[str, int] = uds
    else:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        address = (host, port)
    before = os.umask(0o177) if private else None
    try:
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen at {uds or f'{host}:{port}'}: {error.strerror}") from None
    finally:
        if before is not None:
            os.umask(before)
    return sock
