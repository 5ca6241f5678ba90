"""What the scripts share: servers in processes of their own, a light HTTP client, checks."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TINY_MODEL = ROOT / "tests/golden/data/tiny_chat"
START_SECONDS = 300.0
GREEDY = {"temperature": 0, "ignore_eos": True}
COMPLETIONS = "/v1/completions"


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """A figure against its bar.

    Attributes:
      limit: the figure must not be above it, or not below it where `at_least`.
    """

    what: str
    figure: float
    unit: str
    limit: float
    at_least: bool = False

    @property
    def passed(self) -> bool:
        return self.figure >= self.limit if self.at_least else self.figure <= self.limit

    def __str__(self) -> str:
        bound = ">=" if self.at_least else "<="
        verdict = "pass" if self.passed else "FAIL"
        return f"{verdict}  {self.what}: {self.figure:.4g} {self.unit} (bar {bound} {self.limit:g})"


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What the command line can change.

    Attributes:
      minutes: of the soak.
      repeats: of faults that are injected again and again.
      cases: of the API fuzzer.
    """

    minutes: float = 2.0
    repeats: int = 20
    cases: int = 2000


type Bar = Callable[[Options], list[Check]]
BARS: dict[str, tuple[str, Bar]] = {}


def bar(number: str, title: str) -> Callable[[Bar], Bar]:
    """Registers a function that measures one bar."""

    def register(function: Bar) -> Bar:
        BARS[number] = (title, function)
        return function

    return register


class Server:
    """A server process that listens; `address` is (host, port)."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path):
        self.process = process
        self.log = log
        host, _, port = url.removeprefix("http://").partition(":")
        self.address = (host, int(port))

    def get(self, path: str, timeout: float = 30.0) -> "Reply":
        return asyncio.run(request(self.address, "GET", path, timeout=timeout))

    def post(self, path: str, body: Any, timeout: float = 60.0) -> "Reply":
        return asyncio.run(request(self.address, "POST", path, body, timeout=timeout))

    def complete(self, **fields: Any) -> dict[str, Any]:
        reply = self.post(COMPLETIONS, {"prompt": "Hello", **fields})
        if reply.status != 200:
            raise RuntimeError(f"HTTP {reply.status}: {reply.body[:200]!r}")
        answer: dict[str, Any] = json.loads(reply.body)
        return answer

    def is_ready(self) -> bool:
        try:
            return self.get("/readyz", 2.0).status == 200
        except (OSError, TimeoutError, EOFError):
            return False

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        wait_for(self.is_ready, seconds, self.process)

    def engine(self) -> int:
        """The pid of the engine process."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return next(int(pid) for pid in path.read_text().split() if is_alive(int(pid)))

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's series that have the labels."""
        total = 0.0
        for line in self.get("/metrics").body.decode().splitlines():
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == f"{name}" and all(
                f'{key}="{wanted}"' in series for key, wanted in labels.items()
            ):
                total += float(value)
        return total

    def blocks(self) -> dict[str, int]:
        counts: dict[str, int] = json.loads(self.get("/blocks").body)["counts"]
        return counts

    def idle_faults(self, seconds: float = 10.0) -> list[str]:
        """What is wrong with a server that should have nothing to do."""
        deadline = time.monotonic() + seconds
        while True:
            counts = self.blocks()
            state = {
                "running": self.metric("vllm:num_requests_running"),
                "waiting": self.metric("vllm:num_requests_waiting"),
                "KV use": self.metric("vllm:kv_cache_usage_perc"),
                "used blocks": counts["used"],
                "shared blocks": counts["shared"],
                "load": json.loads(self.get("/load").body)["server_load"],
            }
            wrong = [f"{name}={value:g}" for name, value in state.items() if value]
            if not wrong or time.monotonic() > deadline:
                return wrong
            time.sleep(0.05)

    def idle_check(self) -> Check:
        return Check("idle invariants broken afterwards", len(self.idle_faults()), "", 0)

    def rss(self) -> int:
        """Bytes of the API process."""
        return _status(self.process.pid, "VmRSS") * 1024

    def num_fds(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def end(self, number: int = signal.SIGTERM, seconds: float = 40.0) -> int:
        """Ends the process; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(seconds)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()


def launch(
    *flags: str,
    stub: dict[str, Any] | None = None,
    model: Path = TINY_MODEL,
    wait: bool = True,
    env: dict[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> Server:
    """Starts a server on the tiny model.

    Args:
      stub: settings of an engine made of Python (tests/serving/stub_engine.py) in place of the
        real one.
      prefix: a command that runs the server's.
    """
    module = "serving.commands" if stub is None else "tests.serving.stub_serve"
    handle, name = tempfile.mkstemp(prefix="jaxllm-reliability-", suffix=".log")
    log = Path(name)
    # Few buckets, so that a start takes seconds.
    small = [] if any("batched" in flag for flag in flags) else ["--max-num-batched-tokens=256"]
    serve = [sys.executable, "-m", module, "serve", str(model), "--port=0", *small, *flags]
    command = [*prefix, *serve]
    with os.fdopen(handle, "wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "SERVING_STUB": json.dumps(stub or {}),
                **(env or {}),
            },
            stdout=output,
            stderr=output,
        )
    wait_for(lambda: "listening at " in log.read_text(), START_SECONDS, process)
    server = Server(process, log.read_text().split("listening at ")[1].split()[0], log)
    if wait:
        server.wait_ready()
    return server


@contextlib.contextmanager
def running(*flags: str, **options: Any) -> Iterator[Server]:
    """A server that is ready, and ends with the block."""
    server = launch(*flags, **options)
    try:
        yield server
    finally:
        server.end(signal.SIGKILL)


@dataclasses.dataclass(slots=True)
class Reply:
    """An answer.

    Attributes:
      seconds: from sending the request to the last byte.
      times: monotonic times at which parts of a chunked body came.
      broken: the connection ended before the answer did.
    """

    status: int = 0
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    body: bytes = b""
    seconds: float = 0.0
    times: list[float] = dataclasses.field(default_factory=list)
    broken: bool = False

    @property
    def finished(self) -> bool:
        """A stream that came to its regular end."""
        return b"data: [DONE]" in self.body and b'"error"' not in self.body and not self.broken


async def request(
    address: tuple[str, int],
    method: str,
    path: str,
    body: Any = None,
    *,
    headers: dict[str, str] | None = None,
    stop_after: int | None = None,
    timeout: float = 60.0,
) -> Reply:
    """One request on a connection of its own.

    Args:
      body: sent as JSON; bytes as they are.
      stop_after: leaves after so many parts of the body.

    Raises:
      OSError: no connection.
      TimeoutError: no whole answer in time.
    """
    reply = Reply()
    async with asyncio.timeout(timeout):
        reader, writer = await asyncio.open_connection(*address)
        try:
            data = body if isinstance(body, bytes) else b"" if body is None else _json(body)
            head = [f"{method} {path} HTTP/1.1", f"Host: {address[0]}", "Connection: close"]
            sent = {"Content-Type": "application/json"} if isinstance(body, dict) else {}
            if body is not None:
                sent["Content-Length"] = str(len(data))
            head += [f"{name}: {value}" for name, value in {**sent, **(headers or {})}.items()]
            began = time.monotonic()
            writer.write("\r\n".join([*head, "", ""]).encode() + data)
            with contextlib.suppress(ConnectionError):
                # The server may answer and close before it has read all.
                await writer.drain()
            try:
                await _read_head(reader, reply)
                count = 0
                async for part in _parts(reader, reply):
                    reply.body += part
                    reply.times.append(time.monotonic())
                    count += 1
                    if stop_after is not None and count >= stop_after:
                        break
            except (asyncio.IncompleteReadError, ConnectionError):
                reply.broken = True
            reply.seconds = time.monotonic() - began
        finally:
            writer.close()
    return reply


async def together(
    address: tuple[str, int], bodies: Sequence[Any], *, path: str = COMPLETIONS, **options: Any
) -> list[Reply | BaseException]:
    """Answers to requests that are sent at once; errors stand in their places."""
    work = [request(address, "POST", path, body, **options) for body in bodies]
    return await asyncio.gather(*work, return_exceptions=True)


async def _read_head(reader: asyncio.StreamReader, reply: Reply) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    reply.status = int(head[0].split()[1])
    for line in head[1:]:
        name, _, value = line.partition(":")
        reply.headers[name.lower()] = value.strip()


async def _parts(reader: asyncio.StreamReader, reply: Reply) -> AsyncIterator[bytes]:
    if reply.headers.get("transfer-encoding") != "chunked":
        length = int(reply.headers.get("content-length", "0"))
        if length:
            yield await reader.readexactly(length)
        return
    while True:
        size = int(await reader.readuntil(b"\r\n"), 16)
        part = await reader.readexactly(size + 2)
        if not size:
            return
        yield part[:-2]


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of them do not exceed; 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(len(ordered) * percent / 100 + 0.5) - 1))]


def gaps(reply: Reply) -> list[float]:
    """Seconds between the parts of a stream."""
    return [b - a for a, b in zip(reply.times, reply.times[1:], strict=False)]


def wait_for(
    condition: Callable[[], bool], seconds: float, process: subprocess.Popen[bytes] | None = None
) -> float:
    """Seconds until it is met; TimeoutError after `seconds`, RuntimeError if `process` ends."""
    began = time.monotonic()
    while not condition():
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}")
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"not so after {seconds:g} s")
        time.sleep(0.02)
    return time.monotonic() - began


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _status(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    return 0
