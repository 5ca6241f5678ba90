"""OpenTelemetry: a span per request, sent by OTLP.

Names are those of the semantic conventions for generative AI, and vLLM's beside them where its own
differ: `gen_ai.usage.prompt_tokens`, `gen_ai.request.n`, `gen_ai.latency.*`. Prompts and outputs
never enter a span. The SDK's environment variables hold (OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER,
OTEL_EXPORTER_OTLP_HEADERS, OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, ...).
"""

import contextlib
import contextvars
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from starlette._utils import get_route_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.errors import ConfigError
from jaxllm.sampling_params import SamplingParams
from serving.metrics import RequestTimes

OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
}
_PROTOCOLS = ("grpc", "http/protobuf")
_RPC_FAULTS = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)


@dataclasses.dataclass(slots=True)
class RequestTrace:
    """What a span tells of a request, as it becomes known.

    Attributes:
      times: of every sequence, over all prompts and samples.
      status: of the HTTP answer; 0 while there is none.
      rpc_status: of the gRPC answer, its number and name; None while there is none.
      is_whole: the answer was sent to its end.
    """

    request_id: str = ""
    params: SamplingParams | None = None
    times: list[RequestTimes] = dataclasses.field(default_factory=list)
    status: int = 0
    rpc_status: tuple[int, str] | None = None
    is_whole: bool = False

    def attributes(self) -> dict[str, Any]:
        """The attributes of the span, without the operation and the model."""
        found: dict[str, Any] = {}
        if self.status:
            found["http.response.status_code"] = self.status
        if self.rpc_status is not None:
            found["rpc.grpc.status_code"] = self.rpc_status[0]
        if self.params is None:
            return found
        params, times = self.params, self.times
        found |= {
            "gen_ai.request.id": self.request_id,
            "gen_ai.response.id": self.request_id,
            "gen_ai.request.n": params.n,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
        }
        if params.max_tokens is not None:
            found["gen_ai.request.max_tokens"] = params.max_tokens
        # The samples of a prompt share it.
        prompt = sum(t.num_prompt_tokens for t in times if t.is_first_sample)
        output = sum(t.num_tokens for t in times)
        found |= {
            "gen_ai.usage.input_tokens": prompt,
            "gen_ai.usage.prompt_tokens": prompt,
            "gen_ai.usage.output_tokens": output,
            "gen_ai.usage.completion_tokens": output,
            "gen_ai.usage.cache_read.input_tokens": sum(
                t.num_cached_tokens for t in times if t.is_first_sample
            ),
        }
        reasons = [t.finish_reason for t in times if t.finish_reason is not None]
        if reasons:
            found["gen_ai.response.finish_reasons"] = reasons
        return found | self._latencies()

    def _latencies(self) -> dict[str, float]:
        """Seconds, by the definitions of the metrics; over several sequences from the first one's
        event to the last one's."""
        times = self.times
        arrival = min(t.arrival for t in times)
        scheduled = [t.scheduled for t in times if t.scheduled is not None]
        first = [t.first_token for t in times if t.first_token is not None]
        last = [t.last_token for t in times if t.last_token is not None]
        found = {}
        if scheduled:
            found["gen_ai.latency.time_in_queue"] = min(scheduled) - arrival
        if first:
            found["gen_ai.latency.time_to_first_token"] = min(first) - arrival
            found["gen_ai.latency.time_in_model_decode"] = max(last) - min(first)
            found["gen_ai.latency.e2e"] = max(last) - arrival
        if scheduled and first:
            found["gen_ai.latency.time_in_model_prefill"] = min(first) - min(scheduled)
            found["gen_ai.latency.time_in_model_inference"] = max(last) - min(scheduled)
        return found

    def error_type(self) -> str | None:
        """Why the request did not end well, None if it did."""
        if any(t.finish_reason == "error" for t in self.times):
            return "engine_error"
        if self.status >= 400 and self.status != 499:
            return str(self.status)
        if self.rpc_status is not None and self.rpc_status[0]:
            return self.rpc_status[1]
        return None if self.is_whole and self.status != 499 else "client_left"

    def finish_rpc(self) -> None:
        """The call ended well."""
        self.rpc_status, self.is_whole = (0, "OK"), True

    @property
    def is_servers_fault(self) -> bool:
        """By the conventions of HTTP and gRPC what the client did wrong is no error of a server."""
        if any(t.finish_reason == "error" for t in self.times) or self.status >= 500:
            return True
        return self.rpc_status is not None and self.rpc_status[1] in _RPC_FAULTS


_current: contextvars.ContextVar[RequestTrace | None] = contextvars.ContextVar(
    "current_trace", default=None
)


def note_submitted(request_id: str, params: SamplingParams, times: Sequence[RequestTimes]) -> None:
    """Tells the span of the request that is being served, if there is one, what went to the
    engine."""
    trace = _current.get()
    if trace is not None:
        trace.request_id = request_id
        trace.params = params
        trace.times += times


class Tracing:
    """Makes spans and sends them in the background.

    Args:
      endpoint: of a collector, such as http://localhost:4317 (gRPC) or, with
        OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf, http://localhost:4318/v1/traces.
      model: name in the spans.
      processor: instead of one that sends to `endpoint`.

    Raises:
      ConfigError: the packages of jaxllm[otel] are missing, or the protocol is not known.
    """

    def __init__(self, endpoint: str, model: str, processor: Any = None):
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import (
                TraceContextTextMapPropagator,
            )

            processor = processor or BatchSpanProcessor(_exporter(endpoint))
        except ImportError as error:
            raise ConfigError(
                f"--otlp-traces-endpoint needs the packages of jaxllm[otel]: {error}"
            ) from None
        self.model = model
        # What the environment names goes before what is given here.
        self._provider = TracerProvider(
            resource=Resource.create(_service()), shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("jaxllm")
        self._propagator = TraceContextTextMapPropagator()

    @contextlib.contextmanager
    def request(
        self, operation: str, headers: Mapping[str, str], **attributes: str
    ) -> Iterator[RequestTrace]:
        """A span of a request, below the one that `traceparent` in its headers names.

        What `note_submitted` tells meanwhile goes to it. The caller notes the status of the answer;
        without one the client has left.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode

        trace = RequestTrace()
        span = self._tracer.start_span(
            f"{operation} {self.model}",
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            attributes={
                **attributes,
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "jaxllm",
                "gen_ai.request.model": self.model,
                "gen_ai.response.model": self.model,
            },
        )
        _current.set(trace)
        try:
            yield trace
        except BaseException as error:
            span.record_exception(error)
            raise
        finally:
            # Not by a token: a stream that is given up ends in another context.
            _current.set(None)
            span.set_attributes(trace.attributes())
            error_type = trace.error_type()
            if error_type is not None:
                span.set_attribute("error.type", error_type)
                if trace.is_servers_fault:
                    span.set_status(Status(StatusCode.ERROR))
            span.end()

    def close(self) -> None:
        """Sends what is left, for as long as the exporter's timeout at most."""
        self._provider.shutdown()


class TraceRequests:
    """ASGI middleware: a span for each request that generates."""

    def __init__(self, app: ASGIApp, tracing: Tracing):
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation = None
        if scope["type"] == "http" and scope["method"] == "POST":
            operation = OPERATIONS.get(get_route_path(scope))
        if operation is None:
            await self._app(scope, receive, send)
            return
        headers = {
            key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]
        }
        with self._tracing.request(operation, headers) as trace:

            async def noting(message: Message) -> None:
                if message["type"] == "http.response.start":
                    trace.status = message["status"]
                await send(message)
                if message["type"] == "http.response.body" and not message.get("more_body"):
                    trace.is_whole = True

            await self._app(scope, receive, noting)


def _service() -> dict[str, str]:
    return {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "jaxllm"}


def _exporter(endpoint: str) -> Any:
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"
    )
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
            OTLPSpanExporter as HttpSpanExporter,
        )

        return HttpSpanExporter(endpoint=endpoint)
    raise ConfigError(
        f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL={protocol!r}: one of {', '.join(_PROTOCOLS)}"
    )
