"""A server under test, in a process of its own, and the moments of its start."""

import collections
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence

from serving.bench.client import TargetError

_READY_POLL_SECONDS = 0.02
_END_SECONDS = 30.0
_KEPT_LINES = 20


def serve_command(serve_cmd: str | None) -> list[str]:
    """The command that is given, or this installation's `jaxllm serve`."""
    if serve_cmd is not None:
        return shlex.split(serve_cmd)
    return [sys.executable, "-m", "jaxllm.cli", "serve"]


class ServerProcess:
    """A running server.

    Attributes:
      began: monotonic time at which it was started.
      url: where it listens, once it has said so.
      lines: (monotonic time, text) of what it wrote, in order.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None):
        self.url: str | None = None
        self.lines: list[tuple[float, str]] = []
        self.began = time.monotonic()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **(env or {})},
        )
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_ready(self, timeout: float) -> float:
        """Waits until /health answers 200; the monotonic time of that.

        Raises:
          TargetError: the server ended or took too long; the message has its last lines.
        """
        deadline = self.began + timeout
        while time.monotonic() < deadline and self._process.poll() is None:
            if self._listening.wait(_READY_POLL_SECONDS) and self._healthy():
                return time.monotonic()
            if self._listening.is_set():
                time.sleep(_READY_POLL_SECONDS)
        self._reader.join(0.5)
        last = collections.deque((text for _, text in self.lines), _KEPT_LINES)
        raise TargetError("the server did not get ready:\n" + "\n".join(last))

    def end(self) -> None:
        """Tells the server to end; kills it when it has not after half a minute."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(1.0)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
                return reply.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self.lines.append((time.monotonic(), line.rstrip()))
            if self.url is None and "listening at " in line:
                self.url = line.split("listening at ")[1].split()[0]
                self._listening.set()


@contextlib.contextmanager
def running(
    command: Sequence[str], timeout: float, env: Mapping[str, str] | None = None
) -> Iterator[ServerProcess]:
    """A server that is ready, and ends with the block."""
    server = ServerProcess(command, env)
    try:
        server.wait_ready(timeout)
        yield server
    finally:
        server.end()
