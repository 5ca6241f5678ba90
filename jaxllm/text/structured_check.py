"""Tries grammars in a process of its own, with a time limit that holds whatever the library does.

The library's own limits do not cover everything: some schemas compile for minutes, others overflow
the stack, which would end the process that compiles them.
"""

import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time

from jaxllm.text.structured_library import GrammarError, GrammarLimits, TokenTable
from jaxllm.text.structured_worker import pack_frame, start_frames

_START_SECONDS = 120.0
_HEAD = struct.Struct("<I")


class GrammarChecker:
    """One worker process, started when first needed and again after it was stopped.

    Thread-safe: checks wait for each other. `close` ends the process; it also ends by itself when
    this one does.
    """

    def __init__(self, table: TokenTable, limits: GrammarLimits):
        self._table = table
        self._limits = limits
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None

    def check(self, text: str) -> None:
        """Compile the text of a grammar list and follow it for a few tokens.

        Raises `GrammarError`: the library's message, the time or memory limit, or a crash.
        """
        with self._lock:
            worker = self._started()
            try:
                answer = _exchange(
                    worker, pack_frame(text.encode()), self._limits.compile_seconds
                ).decode()
            except TimeoutError:
                self._kill()
                raise GrammarError(
                    f"compiling takes more than {self._limits.compile_seconds:g} s"
                ) from None
            except EOFError:
                code = self._kill(after_seconds=1.0)
                raise GrammarError(f"compiling ends the compiler ({_death(code)})") from None
            except BaseException:
                self._kill()
                raise
        if answer:
            raise GrammarError(answer)

    def close(self) -> None:
        with self._lock:
            self._kill()

    def __del__(self) -> None:
        self._kill()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._worker is not None and self._worker.poll() is None:
            return self._worker
        self._kill()
        path = os.pathsep.join(filter(None, sys.path))
        self._worker = subprocess.Popen(
            [sys.executable, "-m", "jaxllm.text.structured_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            bufsize=0,
            # An interrupt from the terminal is for the engine, which then closes this one.
            start_new_session=True,
        )
        try:
            _exchange(self._worker, start_frames(self._table, self._limits), _START_SECONDS)
        except (TimeoutError, EOFError) as error:
            code = self._kill()
            raise RuntimeError(f"the grammar compiler does not start ({_death(code)})") from error
        return self._worker

    def _kill(self, after_seconds: float = 0.0) -> int | None:
        """End the process, unless it ends by itself until then; its exit code, None without one."""
        worker, self._worker = self._worker, None
        if worker is None:
            return None
        try:
            code = worker.wait(after_seconds)
        except subprocess.TimeoutExpired:
            worker.kill()
            code = worker.wait()
        for stream in (worker.stdin, worker.stdout):
            if stream is not None:
                stream.close()
        return code


def _exchange(worker: subprocess.Popen[bytes], request: bytes, seconds: float) -> bytes:
    """Send the request; the frame that answers it.

    Raises `TimeoutError`, or `EOFError` where the process ended.
    """
    if worker.stdin is None or worker.stdout is None:
        raise EOFError
    deadline = time.monotonic() + seconds
    try:
        unsent = memoryview(request)
        while unsent:
            unsent = unsent[os.write(worker.stdin.fileno(), unsent) :]
    except BrokenPipeError:
        raise EOFError from None
    descriptor = worker.stdout.fileno()
    size = _HEAD.unpack(_read(descriptor, _HEAD.size, deadline))[0]
    return _read(descriptor, size, deadline)


def _read(descriptor: int, size: int, deadline: float) -> bytes:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    data = b""
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(1000 * left):
            raise TimeoutError
        if not (part := os.read(descriptor, size - len(data))):
            raise EOFError
        data += part
    return data


def _death(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    return signal.Signals(-code).name
