"""Connections that are slow on purpose."""

import contextlib
import resource
import socket
import threading
import time

import pytest
import uvicorn

from serving.http import guard
from serving.http.listener import LIMITS, Server, listen


class Application:
    """Streams without end, and notes when it is told that the client is gone."""

    def __init__(self):
        self.left = threading.Event()

    async def __call__(self, scope, receive, send):
        import asyncio

        async def watch():
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left.set()

        watching = asyncio.ensure_future(watch())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not self.left.is_set():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)
        await watching


@pytest.fixture
def served():
    application = Application()
    with contextlib.closing(listen("127.0.0.1", 0)) as sock:
        server = Server(uvicorn.Config(application, **LIMITS, access_log=False))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            yield application, sock.getsockname()
        finally:
            server.should_exit = server.force_exit = True
            thread.join(10)


def test_a_reader_that_takes_nothing_is_dropped(served, monkeypatch):
    monkeypatch.setattr(guard, "STALL_SECONDS", 0.3)
    application, address = served
    with socket.create_connection(address) as stalled:
        stalled.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert application.left.wait(5)


def test_a_reader_that_takes_little_is_kept(served, monkeypatch):
    monkeypatch.setattr(guard, "STALL_SECONDS", 0.3)
    application, address = served
    with socket.create_connection(address) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        for _ in range(50):
            time.sleep(0.02)
            slow.recv(200_000)
        assert not application.left.is_set()


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\nX-A: b"])
def test_half_a_request_is_not_waited_for(served, monkeypatch, sent):
    monkeypatch.setattr(guard, "HEADER_SECONDS", 0.3)
    _, address = served
    with socket.create_connection(address, timeout=5) as half:
        half.sendall(sent)
        began = time.monotonic()
        assert half.recv(100) == b""
        assert 0.2 < time.monotonic() - began < 3


def test_more_connections_than_descriptors(launch):
    """Accepting goes on when descriptors are there again."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    server = launch()
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (64, hard))
    host, port = server.url.removeprefix("http://").split(":")
    held = [socket.create_connection((host, int(port))) for _ in range(150)]
    time.sleep(0.5)
    for sock in held:
        sock.close()
    server.wait_ready(10)
    assert server.complete(max_tokens=1)
