"""The server process: sockets, signals, start-up and the end."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from serving.admission import AdmissionLimits
from serving.async_llm import AsyncLLM
from serving.engine.supervisor import RestartPolicy
from serving.errors import EngineStartError
from serving.garbage import keep_from_collector
from serving.http.admin import make_admin_app
from serving.http.app import make_app
from serving.http.context import ServerContext
from serving.http.listener import LIMITS, Server, allow_descriptors, listen
from serving.http.settings import ServeConfig
from serving.log_stats import log_stats
from serving.tools.parsers import detect_parser
from serving.tracing import Tracing
from serving.weights import WeightAccess

if TYPE_CHECKING:
    from serving.grpc.server import GrpcServer

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_USER = 2
# Requests were still running when the time for them was over.
EXIT_CUT = 3
EXIT_ENGINE = 70
_LOCALHOST = "127.0.0.1"
_MAX_ADMIN_CONNECTIONS = 64
# Descriptors beside those of connections.
_OTHER_FILES = 256
_POLL_SECONDS = 0.05


class HttpServer:
    """An engine and its HTTP front, from start to end."""

    def __init__(
        self,
        engine_config: EngineConfig,
        settings: ServeConfig,
        *,
        progress: bool = False,
        engine_module: str = "serving.engine.process",
    ):
        self.settings = settings
        self.keys = settings.all_keys()
        names = settings.served_model_name or (engine_config.model,)
        self.llm = AsyncLLM(
            engine_config,
            model_name=names[0],
            limits=AdmissionLimits(
                settings.max_num_queued_reqs,
                settings.max_num_queued_tokens,
                settings.max_queue_time,
            ),
            restarts=RestartPolicy(settings.restart_engine),
            hang_timeout=settings.hang_timeout,
            progress=progress,
            engine_module=engine_module,
        )
        isolation = settings.cache_isolation
        self.context = ServerContext(
            self.llm,
            settings,
            names,
            isolate_keys=isolation == "key" or (isolation == "auto" and len(self.keys) > 1),
            chat_template=_read_template(settings.chat_template),
            tracing=_tracing(settings.otlp_traces_endpoint, names[0]),
        )
        self._num_signals = 0
        self._stop = asyncio.Event()
        self._exit_code = EXIT_OK

    async def run(self, on_listening: Callable[[str], None] | None = None) -> int:
        """Serves until told to stop; returns the exit code.

        Args:
          on_listening: called with the URL once the socket is bound, before the model loads.

        Raises:
          ConfigError: the socket cannot be bound, or the certificate not be read.
        """
        settings = self.settings
        allow_descriptors(settings.max_connections + _OTHER_FILES)
        with contextlib.ExitStack() as sockets:
            sock = listen(settings.host, settings.port, settings.uds)
            sockets.enter_context(contextlib.closing(sock))
            server = Server(self._uvicorn_config())
            url = self._url(sock)
            admin = self._start_admin(sockets)
            grpc_server = await self._start_grpc()
            if on_listening is not None:
                on_listening(url)
            self._warn()
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._on_signal)
            serving = loop.create_task(server.serve(sockets=[sock]))
            engine = loop.create_task(self._run_engine(url))
            stop = loop.create_task(self._stop.wait())
            try:
                await asyncio.wait({serving, engine, stop}, return_when=asyncio.FIRST_COMPLETED)
                if engine.done() and not stop.done():
                    self._exit_code = engine.result()
                else:
                    await self._drain()
            finally:
                engine.cancel()
                if grpc_server is not None:
                    await grpc_server.stop(0.0)
                await self.llm.close()
                server.should_exit = True
                admin.cancel()
                await asyncio.wait({serving}, timeout=5.0)
                if self.context.tracing is not None:
                    await asyncio.to_thread(self.context.tracing.close)
        for uds in (settings.uds, settings.admin_uds):
            if uds is not None:
                Path(uds).unlink(missing_ok=True)
        return self._exit_code

    def _start_admin(self, sockets: contextlib.ExitStack) -> "asyncio.Task[None]":
        """Serves the routes of control, where they are wanted; the task ends when cancelled."""
        settings = self.settings
        if settings.admin_port is None and settings.admin_uds is None:
            return asyncio.get_running_loop().create_task(asyncio.sleep(0))
        sock = listen(_LOCALHOST, settings.admin_port or 0, settings.admin_uds, private=True)
        sockets.enter_context(contextlib.closing(sock))
        config = uvicorn.Config(
            make_admin_app(self.context, settings.admin_api_key),
            **LIMITS,
            access_log=False,
            limit_concurrency=_MAX_ADMIN_CONNECTIONS,
        )
        where = settings.admin_uds or f"http://{_LOCALHOST}:{sock.getsockname()[1]}"
        logger.info("control at %s", where)
        if settings.admin_uds is None and not settings.admin_api_key:
            logger.warning("every user of this machine can control the server: no admin_api_key")
        return asyncio.get_running_loop().create_task(Server(config).serve(sockets=[sock]))

    async def _start_grpc(self) -> "GrpcServer | None":
        settings = self.settings
        if settings.grpc_port is None:
            return None
        try:
            from serving.grpc.server import GrpcServer
        except ImportError as error:
            raise ConfigError(f"grpc_port needs the packages of jaxllm[grpc]: {error}") from None
        if settings.ssl_certfile is not None:
            raise ConfigError("grpc_port: TLS is served over HTTP only; leave one of them out")
        folder = None if settings.weights_dir is None else Path(settings.weights_dir)
        access = WeightAccess(settings.enable_weight_control, folder)
        server = GrpcServer(
            self.llm,
            self.context.names,
            self.keys,
            access,
            isolate_keys=self.context.isolate_keys,
            tracing=self.context.tracing,
        )
        port = await server.start(settings.host, settings.grpc_port)
        logger.info("gRPC at %s:%d", settings.host, port)
        return server

    def _uvicorn_config(self) -> uvicorn.Config:
        settings = self.settings
        try:
            config = uvicorn.Config(
                make_app(self.context, self.keys),
                **LIMITS,
                access_log=settings.access_log,
                limit_concurrency=settings.max_connections,
                ssl_certfile=settings.ssl_certfile,
                ssl_keyfile=settings.ssl_keyfile,
                ssl_ca_certs=settings.ssl_ca_certs,
                ssl_cert_reqs=ssl.CERT_REQUIRED if settings.ssl_ca_certs else ssl.CERT_NONE,
            )
            config.load()
        except OSError as error:
            raise ConfigError(f"TLS: {error}") from None
        return config

    async def _run_engine(self, url: str) -> int:
        """Starts the engine and waits for its final end; the exit code that follows from it."""
        try:
            await self.llm.start()
        except EngineStartError as error:
            logger.error("%s", error)
            return EXIT_USER if error.user_can_mend else EXIT_ENGINE
        except ValueError as error:
            logger.error("%s", error)
            return EXIT_USER
        self._choose_tool_parser()
        keep_from_collector()
        seconds = self.llm.description.start_seconds
        logger.info("ready after %.1f s: %s/v1, model %s", seconds, url, self.context.names[0])
        if not self.settings.disable_log_stats:
            self._log_task = asyncio.get_running_loop().create_task(
                log_stats(self.llm, self.settings.log_stats_interval)
            )
        await self.llm.supervisor.ended.wait()
        logger.critical("the engine is dead; the server ends")
        # Errors of requests in flight are still to be written.
        await asyncio.sleep(0.5)
        return EXIT_ENGINE

    def _choose_tool_parser(self) -> None:
        chosen = self.settings.tool_call_parser
        if chosen != "auto":
            self.context.tool_parser = None if chosen == "none" else chosen
            return
        tokenizer = self.llm.tokenizer
        template = self.context.chat_template
        if template is None and tokenizer is not None:
            template = tokenizer.tool_chat_template
        self.context.tool_parser = detect_parser(template)
        logger.info("tool call parser: %s", self.context.tool_parser or "none fits the template")

    def _on_signal(self) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            self._stop.set()
            return
        logger.warning("second signal: ending at once")
        self.llm.supervisor.kill()
        os._exit(128 + signal.SIGTERM)

    async def _drain(self) -> None:
        """Refuses new requests and lets the running ones finish, within the time for it."""
        self.llm.draining = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.settings.shutdown_timeout
        if self.llm.num_unfinished:
            logger.info(
                "shutting down: %d requests get up to %.0f s",
                self.llm.num_unfinished,
                self.settings.shutdown_timeout,
            )
        while (self.context.server_load or self.llm.num_unfinished) and loop.time() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
        if self.llm.num_unfinished:
            logger.warning("%d requests are cut off", self.llm.num_unfinished)
            self._exit_code = EXIT_CUT

    def _url(self, sock: socket.socket) -> str:
        settings = self.settings
        if settings.uds is not None:
            return f"unix:{settings.uds}"
        host, port = sock.getsockname()[:2]
        scheme = "https" if settings.ssl_certfile else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{settings.root_path}"

    def _warn(self) -> None:
        settings = self.settings
        local = settings.uds is not None or settings.host in ("127.0.0.1", "::1", "localhost")
        if not local and not self.keys:
            logger.warning("anybody who reaches %s can use this server: no API key", settings.host)


def _tracing(endpoint: str | None, model: str) -> Tracing | None:
    return None if endpoint is None else Tracing(endpoint, model)


def _read_template(value: str | None) -> str | None:
    """A chat template, or the content of the file that is named."""
    if value is None or "{" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template: {error}") from None
