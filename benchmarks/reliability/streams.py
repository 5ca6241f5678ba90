"""A client that costs little: `python -m benchmarks.reliability.streams HOST PORT BODY`.

It shares two cores with what it measures, so it has a process of its own, parses no more than it
must, and looks for news every two milliseconds, for which no sender has to wake it. Its last line
is a JSON object.
"""

import argparse
import dataclasses
import json
import selectors
import socket
import subprocess
import sys
import time
from typing import Any

from benchmarks.reliability.harness import COMPLETIONS, ROOT, percentile

_POLL_SECONDS = 0.002


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What the streams showed.

    Attributes:
      events: between `skip` and `skip + seconds` after the start.
      gaps: seconds between the parts of a stream meanwhile, their p50, p99 and largest.
      finished: streams that came to their regular end.
    """

    events: int
    gaps: tuple[float, float, float]
    finished: int


def measure(address: tuple[str, int], body: Any, **options: float) -> "subprocess.Popen[str]":
    """Starts the client in a process; `result` waits for what it found."""
    flags = [f"--{name}={value}" for name, value in options.items()]
    place = [address[0], str(address[1]), json.dumps(body)]
    command = [sys.executable, "-m", "benchmarks.reliability.streams", *place, *flags]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def result(process: "subprocess.Popen[str]") -> Found:
    """RuntimeError if the client failed."""
    output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"the client ended with {process.returncode}")
    found = json.loads(output.splitlines()[-1])
    return Found(found["events"], tuple(found["gaps"]), found["finished"])


def http_post(path: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class _Streams:
    """Streams that are read together."""

    def __init__(self, address: tuple[str, int], message: bytes):
        self._address = address
        self._message = message
        self._selector = selectors.DefaultSelector()
        self._last: dict[socket.socket, float] = {}
        self._tails: dict[socket.socket, bytes] = {}
        self.finished = 0
        self.events = 0
        self.gaps: list[float] = []

    @property
    def num_open(self) -> int:
        return len(self._tails)

    def start(self, count: int) -> None:
        for _ in range(count):
            sock = socket.create_connection(self._address)
            sock.sendall(self._message)
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ)
            self._tails[sock] = b""

    def read(self, counts: bool) -> None:
        """Takes what has come; `counts` says whether it is part of the result."""
        ready = self._selector.select(0)
        now = time.monotonic()
        for key, _ in ready:
            sock: Any = key.fileobj
            data = sock.recv(1 << 20)
            if not data:
                self.finished += b"data: [DONE]" in self._tails.pop(sock)
                self._last.pop(sock, None)
                self._selector.unregister(sock)
                sock.close()
                continue
            self._tails[sock] = (self._tails[sock] + data)[-64:]
            last = self._last.get(sock)
            self._last[sock] = now
            if counts:
                self.events += data.count(b"data: {")
                if last is not None:
                    self.gaps.append(now - last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("body", help="JSON of the requests")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--skip", type=float, default=0.0, help="seconds before it counts")
    parser.add_argument("--seconds", type=float, default=5.0, help="that count; none start later")
    options = parser.parse_args()
    message = http_post(COMPLETIONS, options.body.encode())
    streams = _Streams((options.host, options.port), message)
    begin = time.monotonic() + options.skip
    end = begin + options.seconds
    while (now := time.monotonic()) < end or streams.num_open:
        if now < end:
            streams.start(options.streams - streams.num_open)
        streams.read(begin < now < end)
        time.sleep(_POLL_SECONDS)
    gaps = [
        percentile(streams.gaps, 50),
        percentile(streams.gaps, 99),
        max(streams.gaps, default=0),
    ]
    print(json.dumps({"events": streams.events, "gaps": gaps, "finished": streams.finished}))


if __name__ == "__main__":
    main()
