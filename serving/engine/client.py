"""The API process's end of an engine process: start, commands, news, its death."""

import asyncio
import contextlib
import dataclasses
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from jaxllm.config import EngineConfig
from serving.engine.messages import (
    Call,
    Command,
    Description,
    Failed,
    News,
    Ready,
    Reply,
    Start,
    StepNews,
    Stop,
)
from serving.engine.parent import COMPILING
from serving.errors import ControlError, EngineDeadError, EngineStartError

logger = logging.getLogger(__name__)

_ROOT = Path(__file__).resolve().parents[2]


class EngineClient:
    """One engine process. A new one is needed after it died.

    Attributes:
      description: what the engine is, once `start` has returned.
      last_pulse, last_step: monotonic times of its last sign of life and its last finished step.
      compiling: XLA was compiling at the last sign of life.
    """

    description: Description

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_news: Callable[[StepNews], None],
        on_death: Callable[[EngineDeadError], None],
        progress: bool = False,
        module: str = "serving.engine.process",
    ):
        self._config = config
        self._module = module
        self._progress = progress
        self._on_news = on_news
        self._on_death = on_death
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(News)
        self._outbox: list[Command] = []
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._dead = False
        self._closing = False
        self.compiling = False
        self.last_pulse = self.last_step = time.monotonic()

    async def start(self) -> Description:
        """Starts the process and waits until the engine is ready.

        Raises:
          EngineStartError: it could not start; the message is the engine's own.
        """
        self._loop = asyncio.get_running_loop()
        # Readable by this user only: whoever reaches the socket can talk to the engine.
        self._folder = tempfile.mkdtemp(prefix="jaxllm-")
        address = f"ipc://{self._folder}/engine"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        pulse_read, pulse_write = os.pipe()
        # The module path is given by hand so that the current folder is never searched.
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    self._module,
                    address,
                    str(os.getpid()),
                    str(pulse_write),
                ],
                stdin=subprocess.PIPE,
                pass_fds=(pulse_write,),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
        finally:
            os.close(pulse_write)
        os.set_blocking(pulse_read, False)
        self._pulse = pulse_read
        self._loop.add_reader(pulse_read, self._hear_pulse)
        self._end: asyncio.Future[None] = self._loop.create_future()
        self.last_pulse = time.monotonic()
        level = logging.getLogger("jaxllm").getEffectiveLevel()
        config = dataclasses.asdict(self._config)
        await self._socket.send(self._encoder.encode([Start(config, level, self._progress)]))
        try:
            first = await self._first_news()
        except BaseException:
            self.kill()
            raise
        self.description = first
        self.last_step = time.monotonic()
        self._reader = self._loop.create_task(self._read())
        return first

    def send(self, command: Command) -> None:
        """Queues a command; those of one turn of the event loop leave as one message."""
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(command)

    async def call(self, name: str, **arguments: Any) -> Any:
        """Runs a control function in the engine and returns its result.

        Raises:
          ControlError: it failed.
          EngineDeadError: the engine ended before it answered.
        """
        if self._dead:
            raise EngineDeadError("the engine process is gone")
        call_id = len(self._replies) and max(self._replies) + 1
        future = self._replies[call_id] = self._loop.create_future()
        self.send(Call(call_id, name, arguments))
        try:
            return await future
        finally:
            del self._replies[call_id]

    async def close(self, timeout: float = 2.0) -> None:
        """Ends the process: told to, and killed when it has not ended after `timeout` seconds."""
        self._closing = True
        if self._process is None:
            return
        if not self._dead and hasattr(self, "_reader"):
            # While it starts it reads no commands.
            self.send(Stop())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._end), timeout)
        self.kill()

    def kill(self) -> None:
        """Ends the process at once."""
        if self._process is not None and self._process.poll() is None:
            # A stopped process does not act on anything gentler.
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        self._ended()

    async def _first_news(self) -> Description:
        receive: asyncio.Future[Any] = asyncio.ensure_future(self._socket.recv())
        await asyncio.wait({receive, self._end}, return_when=asyncio.FIRST_COMPLETED)
        if not receive.done():
            # What it said last may still be on its way.
            await asyncio.wait({receive}, timeout=0.2)
        if not receive.done():
            receive.cancel()
            code = self._process.wait() if self._process is not None else None
            raise EngineStartError(
                f"the engine process ended while it started ({_ending(code)})", False
            )
        news = self._decoder.decode(receive.result())
        if isinstance(news, Ready):
            return news.description
        if isinstance(news, Failed):
            raise EngineStartError(news.message, news.user_can_mend)
        raise EngineStartError(f"unexpected {type(news).__name__} from the engine", False)

    async def _read(self) -> None:
        while True:
            news = self._decoder.decode(await self._socket.recv())
            if isinstance(news, StepNews):
                self.last_step = time.monotonic()
                self._on_news(news)
            elif isinstance(news, Reply):
                future = self._replies.get(news.call_id)
                if future is not None and not future.done():
                    if news.error is None:
                        future.set_result(news.result)
                    else:
                        future.set_exception(ControlError(news.error, news.fault))

    def _flush(self) -> None:
        commands, self._outbox = self._outbox, []
        if not self._dead:
            # Without a high-water mark a send never waits.
            self._socket.send(self._encoder.encode(commands))

    def _hear_pulse(self) -> None:
        try:
            data = os.read(self._pulse, 4096)
        except BlockingIOError:
            return
        if data:
            self.last_pulse = time.monotonic()
            self.compiling = data.endswith(COMPILING)
        else:
            # The pipe closes with the process, whatever ended it.
            self._ended()

    def _ended(self) -> None:
        if self._dead:
            return
        self._dead = True
        if self._process is None:
            return
        self._loop.remove_reader(self._pulse)
        os.close(self._pulse)
        if self._process.stdin is not None:
            self._process.stdin.close()
        if not self._end.done():
            self._end.set_result(None)
        reader = getattr(self, "_reader", None)
        started = reader is not None
        if reader is not None:
            reader.cancel()
        self._loop.call_later(1.0, self._clean_up)
        if started:
            error = EngineDeadError("the engine process ended unexpectedly")
            for future in self._replies.values():
                if not future.done():
                    future.set_exception(error)
            if not self._closing:
                self._on_death(error)

    def _clean_up(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._process is not None:
            self._process.poll()


def _ending(code: int | None) -> str:
    if code is None:
        return "unknown reason"
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
