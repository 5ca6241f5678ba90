"""Supervisor: keeps an engine process running, notices one that died or hangs, starts another."""

import asyncio
import collections
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any, Literal

from jaxllm.config import EngineConfig
from serving.engine.client import EngineClient
from serving.engine.messages import Command, Description, StepNews
from serving.errors import EngineDeadError, EngineStartError, NotReadyError

logger = logging.getLogger(__name__)

# Without a sign of life for so long the process counts as stopped; it beats once a second.
PULSE_TIMEOUT = 8.0
_WATCH_SECONDS = 0.5

type State = Literal["starting", "ready", "unresponsive", "restarting", "dead"]


@dataclasses.dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often a lost engine is replaced: at most `limit` times in `window` seconds."""

    limit: int = 0
    window: float = 600.0


class Supervisor:
    """Owns the engine process.

    Attributes:
      state: "ready" is the only one in which requests are served; "dead" is final.
      description: of the engine, None before it was ready for the first time.
      num_restarts: so far.
      ended: done once the state is "dead".
    """

    def __init__(
        self,
        config: EngineConfig,
        restarts: RestartPolicy,
        *,
        on_news: Callable[[StepNews], None],
        on_loss: Callable[[EngineDeadError], None],
        has_work: Callable[[], bool],
        hang_timeout: float,
        progress: bool = False,
        engine_module: str = "serving.engine.process",
    ):
        self._config = config
        self._restarts = restarts
        self._on_news = on_news
        self._on_loss = on_loss
        self._has_work = has_work
        self._hang_timeout = hang_timeout
        self._progress = progress
        self._engine_module = engine_module
        self._client: EngineClient | None = None
        self._watch_task: asyncio.Task[None] | None = None
        self._restart_task: asyncio.Task[None] | None = None
        self._restart_times: collections.deque[float] = collections.deque()
        self._work_since: float | None = None
        self.state: State = "starting"
        self.description: Description | None = None
        self.num_restarts = 0
        self.ended = asyncio.Event()

    def check_ready(self) -> None:
        """Raises NotReadyError, with the reason, in any state but "ready"."""
        if self.state != "ready":
            reason = {
                "starting": "the engine is starting",
                "restarting": "the engine ended and is being restarted",
                "unresponsive": "the engine does not respond",
                "dead": "the engine is dead",
            }[self.state]
            raise NotReadyError(reason)

    async def start(self) -> Description:
        """Starts the first engine process; EngineStartError if it cannot start."""
        self.description = await self._start_client()
        self.state = "ready"
        self._watch_task = asyncio.get_running_loop().create_task(self._watch())
        return self.description

    def send(self, command: Command) -> None:
        """To the engine, if there is one; what is lost with it was failed by `on_loss`."""
        if self._client is not None:
            self._client.send(command)

    async def call(self, name: str, **arguments: Any) -> Any:
        if self._client is None:
            raise NotReadyError("there is no engine")
        return await self._client.call(name, **arguments)

    def kill(self) -> None:
        """Ends the engine process at once."""
        self.state = "dead"
        if self._client is not None:
            self._client.kill()

    async def close(self) -> None:
        """Ends the engine process for good."""
        self.state = "dead"
        for task in (self._watch_task, self._restart_task):
            if task is not None:
                task.cancel()
        if self._client is not None:
            await self._client.close()
        self.ended.set()

    async def _start_client(self) -> Description:
        self._client = EngineClient(
            self._config,
            on_news=self._on_news,
            on_death=self._lost,
            progress=self._progress,
            module=self._engine_module,
        )
        return await self._client.start()

    def _lost(self, error: EngineDeadError) -> None:
        if self.state == "dead":
            return
        logger.error("%s; requests in flight are lost", error)
        self.state = "restarting"
        self._client = None
        self._on_loss(error)
        now = time.monotonic()
        while self._restart_times and self._restart_times[0] < now - self._restarts.window:
            self._restart_times.popleft()
        if len(self._restart_times) >= self._restarts.limit:
            if self._restarts.limit:
                logger.critical(
                    "the engine ended %d times in %.0f s; giving up",
                    self._restarts.limit + 1,
                    self._restarts.window,
                )
            self._die()
            return
        self._restart_times.append(now)
        self._restart_task = asyncio.get_running_loop().create_task(self._restart())

    async def _restart(self) -> None:
        began = time.monotonic()
        try:
            await self._start_client()
        except EngineStartError as error:
            logger.error("the engine did not start again: %s", error)
            self._lost(EngineDeadError(str(error)))
            return
        self.num_restarts += 1
        self.state = "ready"
        logger.warning("engine restarted in %.1f s", time.monotonic() - began)

    def _die(self) -> None:
        self.state = "dead"
        self.ended.set()

    async def _watch(self) -> None:
        """Marks an engine that gives no sign of life, and ends one that hangs."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            client = self._client
            if client is None or self.state not in ("ready", "unresponsive"):
                self._work_since = None
                continue
            now = time.monotonic()
            if not self._has_work() or client.compiling:
                self._work_since = None
            elif self._work_since is None:
                self._work_since = now
            silent = now - client.last_pulse
            stuck = 0.0
            if self._work_since is not None:
                # A step counts from when there was work for it.
                stuck = now - max(client.last_step, self._work_since)
            if max(silent, stuck) > self._hang_timeout:
                logger.error(
                    "the engine hangs: no %s for %.0f s; ending it",
                    "sign of life" if silent > self._hang_timeout else "finished step",
                    max(silent, stuck),
                )
                client.kill()
            elif silent > PULSE_TIMEOUT and self.state == "ready":
                logger.error("no sign of life from the engine for %.0f s", silent)
                self.state = "unresponsive"
            elif silent <= PULSE_TIMEOUT and self.state == "unresponsive":
                logger.warning("the engine responds again")
                self.state = "ready"
