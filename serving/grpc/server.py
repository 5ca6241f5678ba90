"""The gRPC server: keys, status codes, health and reflection around the service."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jaxllm.errors import ConfigError
from serving.api_keys import ApiKeys, given_key
from serving.async_llm import AsyncLLM
from serving.errors import (
    ControlError,
    EngineDeadError,
    NotReadyError,
    OverloadedError,
    RequestFailedError,
    RequestRefusedError,
)
from serving.grpc import messages as pb
from serving.grpc.service import Control, Inference
from serving.tracing import RequestTrace, Tracing
from serving.weights import WeightAccess

_HEALTH_SECONDS = 0.5
_MAX_MESSAGE = 64 * 2**20
_OPTIONS = [
    ("grpc.max_receive_message_length", _MAX_MESSAGE),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.so_reuseport", 0),
]
_OPEN_PREFIXES = ("/grpc.health.v1.Health/", "/grpc.reflection.")
_GENERATING = frozenset({"Generate", "GenerateStream", "Score"})
SERVICES = {name: pb.DESCRIPTOR.services_by_name[name] for name in ("Inference", "Control")}


def status_of(error: Exception) -> tuple[grpc.StatusCode, str]:
    """The status that tells a client what kind of fault it was."""
    code = grpc.StatusCode
    match error:
        case ControlError():
            faults = {
                "argument": code.INVALID_ARGUMENT,
                "state": code.FAILED_PRECONDITION,
                "missing": code.NOT_FOUND,
                "denied": code.PERMISSION_DENIED,
            }
            return faults.get(error.fault, code.INTERNAL), str(error)
        case OverloadedError():
            return code.RESOURCE_EXHAUSTED, str(error)
        case NotReadyError() | EngineDeadError():
            return code.UNAVAILABLE, str(error)
        case RequestRefusedError():
            return code.INVALID_ARGUMENT, str(error)
        case RequestFailedError():
            return code.INTERNAL, "the engine could not finish this request"
        case ValueError():
            return code.INVALID_ARGUMENT, str(error)
    return code.INTERNAL, "internal error"


class GrpcServer:
    """Serves Inference and Control of one AsyncLLM."""

    def __init__(
        self,
        llm: AsyncLLM,
        names: tuple[str, ...],
        keys: tuple[str, ...] = (),
        access: WeightAccess = WeightAccess(),  # noqa: B008 - frozen
        *,
        isolate_keys: bool = False,
        tracing: Tracing | None = None,
    ):
        self._llm = llm
        self._server = grpc.aio.server(options=_OPTIONS, interceptors=[_Authentication(keys)])
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        implementations = {
            "Inference": Inference(llm, isolate_keys),
            "Control": Control(llm, names, access),
        }
        for name, implementation in implementations.items():
            self._server.add_generic_rpc_handlers((_handlers(name, implementation, tracing),))
        full_names = [service.full_name for service in SERVICES.values()]
        self._names = ["", *full_names]
        reflection.enable_server_reflection(
            (*full_names, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        self._watch: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port.

        Raises:
          ConfigError: the address is in use or not ours.
        """
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen at {address}: {error}") from None
        if bound == 0:
            raise ConfigError(f"cannot listen at {address}")
        await self._set_health(False)
        await self._server.start()
        self._watch = asyncio.get_running_loop().create_task(self._watch_health())
        return bound

    async def stop(self, grace: float) -> None:
        """Refuses new calls and waits `grace` seconds for those that run."""
        if self._watch is not None:
            self._watch.cancel()
        await self._set_health(False)
        await self._server.stop(grace)

    async def _watch_health(self) -> None:
        last: bool | None = None
        while True:
            try:
                self._llm.check_ready()
                ready = True
            except NotReadyError:
                ready = False
            if ready is not last:
                await self._set_health(ready)
                last = ready
            await asyncio.sleep(_HEALTH_SECONDS)

    async def _set_health(self, ready: bool) -> None:
        kinds = health_pb2.HealthCheckResponse
        for name in self._names:
            await self._health.set(name, kinds.SERVING if ready else kinds.NOT_SERVING)


class _Authentication(grpc.aio.ServerInterceptor):
    """Demands one of the API keys, but for health and reflection."""

    def __init__(self, keys: tuple[str, ...]):
        self._keys = ApiKeys(keys)

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        is_open = not self._keys or details.method.startswith(_OPEN_PREFIXES)
        if is_open or given_key(details.invocation_metadata) in self._keys:
            return await continuation(details)
        return grpc.unary_unary_rpc_method_handler(_refuse)


async def _refuse(request: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "an API key is needed")


def _handlers(name: str, implementation: object, tracing: Tracing | None) -> grpc.GenericRpcHandler:
    service = SERVICES[name]
    methods = {}
    for method in service.methods:
        request_type = getattr(pb, method.input_type.name)
        function = getattr(implementation, method.name)
        trace = _Trace(tracing, service.full_name, method.name)
        if method.client_streaming:
            make, wrapped = grpc.stream_unary_rpc_method_handler, _unary(function, trace)
        elif method.server_streaming:
            make, wrapped = grpc.unary_stream_rpc_method_handler, _streaming(function, trace)
        else:
            make, wrapped = grpc.unary_unary_rpc_method_handler, _unary(function, trace)
        methods[method.name] = make(
            wrapped,
            request_deserializer=request_type.FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )
    return grpc.method_handlers_generic_handler(service.full_name, methods)


class _Trace:
    """Makes the span of a call, for the methods that generate."""

    def __init__(self, tracing: Tracing | None, service: str, method: str):
        self._tracing = tracing if method in _GENERATING else None
        self._service = service
        self._method = method

    @contextlib.contextmanager
    def __call__(self, context: Any) -> Iterator[RequestTrace]:
        if self._tracing is None:
            yield RequestTrace()
            return
        metadata = {
            key: value for key, value in context.invocation_metadata() if isinstance(value, str)
        }
        names = {"rpc.system": "grpc", "rpc.service": self._service, "rpc.method": self._method}
        with self._tracing.request("text_completion", metadata, **names) as trace:
            yield trace


async def _fail(context: Any, trace: RequestTrace, error: Exception) -> None:
    code, message = status_of(error)
    trace.rpc_status = (code.value[0], code.name)
    await context.abort(code, message)


def _unary(
    function: Callable[[Any, Any], Awaitable[Any]], make_trace: _Trace
) -> Callable[[Any, Any], Any]:
    async def call(request: Any, context: Any) -> Any:
        with make_trace(context) as trace:
            try:
                answer = await function(request, context)
            except Exception as error:
                await _fail(context, trace, error)
            else:
                trace.finish_rpc()
                return answer

    return call


def _streaming(
    function: Callable[[Any, Any], AsyncIterator[Any]], make_trace: _Trace
) -> Callable[[Any, Any], Any]:
    async def call(request: Any, context: Any) -> AsyncIterator[Any]:
        with make_trace(context) as trace:
            try:
                async for message in function(request, context):
                    yield message
                trace.finish_rpc()
            except Exception as error:
                await _fail(context, trace, error)

    return call
