"""OpenTelemetry: one span per request, with its attributes, below the caller's span."""

import asyncio
import concurrent.futures
import queue
import sys

import grpc
import pytest

from jaxllm.client import Client
from jaxllm.errors import ConfigError
from jaxllm.sampling_params import SamplingParams
from serving.grpc import messages as pb
from serving.grpc.requests import make_request
from serving.metrics import RequestTimes
from serving.tracing import RequestTrace, TraceRequests, Tracing, note_submitted
from tests.serving.test_grpc import free_port

pytest.importorskip("opentelemetry.sdk")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PARAMS = SamplingParams(n=2, max_tokens=7, temperature=0.5, top_p=0.9)


def times(arrival, scheduled, first, last, num_tokens, *, prompt=5, is_first=True, reason="stop"):
    made = RequestTimes(arrival, prompt, PARAMS, is_first)
    made.scheduled, made.first_token, made.last_token = scheduled, first, last
    made.num_tokens, made.finish_reason = num_tokens, reason
    return made


def test_attributes_follow_the_definitions_of_the_metrics():
    trace = RequestTrace("cmpl-1", PARAMS, status=200, is_whole=True)
    trace.times = [
        times(10.0, 11.0, 13.0, 17.0, 4),
        times(10.0, 12.0, 14.0, 19.0, 3, is_first=False, reason="length"),
    ]
    trace.times[0].num_cached_tokens = 2
    assert trace.attributes() == {
        "http.response.status_code": 200,
        "gen_ai.request.id": "cmpl-1",
        "gen_ai.response.id": "cmpl-1",
        "gen_ai.request.n": 2,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 7,
        # Both samples have the one prompt.
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.prompt_tokens": 5,
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.usage.completion_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.response.finish_reasons": ["stop", "length"],
        "gen_ai.latency.time_in_queue": 1.0,
        "gen_ai.latency.time_to_first_token": 3.0,
        "gen_ai.latency.time_in_model_prefill": 2.0,
        "gen_ai.latency.time_in_model_decode": 6.0,
        "gen_ai.latency.time_in_model_inference": 8.0,
        "gen_ai.latency.e2e": 9.0,
    }
    assert trace.error_type() is None


def test_a_request_that_never_ran_has_no_latencies():
    trace = RequestTrace("r", PARAMS, [RequestTimes(1.0, 5, PARAMS)], 200)
    assert not [name for name in trace.attributes() if "latency" in name]
    assert trace.error_type() == "client_left"
    assert RequestTrace(status=400, is_whole=True).error_type() == "400"
    assert RequestTrace(status=499, is_whole=True).error_type() == "client_left"
    busy = RequestTrace(rpc_status=(8, "RESOURCE_EXHAUSTED"))
    assert busy.error_type() == "RESOURCE_EXHAUSTED" and not busy.is_servers_fault
    assert RequestTrace(rpc_status=(14, "UNAVAILABLE")).is_servers_fault
    trace.times[0].finish_reason = "error"
    assert trace.error_type() == "engine_error" and trace.is_servers_fault


@pytest.fixture
def spans():
    """(Tracing, the list of its finished spans)."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracing = Tracing("unused", "m", SimpleSpanProcessor(exporter))
    yield tracing, exporter.get_finished_spans
    tracing.close()


def serve(tracing, status=200, body=b"x", path="/v1/chat/completions", method="POST", fault=None):
    async def app(scope, receive, send):
        note_submitted("chat-1", PARAMS, [times(0.0, 1.0, 2.0, 3.0, 4)])
        await send({"type": "http.response.start", "status": status, "headers": []})
        if fault is not None:
            raise fault
        await send({"type": "http.response.body", "body": body})

    async def nothing(*message):
        pass

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(b"traceparent", PARENT.encode()), (b"x", b"\xff")],
    }
    asyncio.run(TraceRequests(app, tracing)(scope, nothing, nothing))


def test_a_span_is_below_the_callers(spans):
    tracing, finished = spans
    serve(tracing)
    (span,) = finished()
    assert span.name == "chat m" and span.kind.name == "SERVER"
    assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    assert span.attributes["gen_ai.operation.name"] == "chat"
    assert span.attributes["gen_ai.request.model"] == "m"
    assert span.attributes["gen_ai.usage.output_tokens"] == 4
    assert span.resource.attributes["service.name"] == "jaxllm"
    assert "error.type" not in span.attributes and span.status.is_unset


def test_only_requests_that_generate_have_spans(spans):
    tracing, finished = spans
    serve(tracing, path="/health")
    serve(tracing, method="GET")
    assert not finished()
    note_submitted("outside of a request", PARAMS, [])


def test_faults_are_told(spans):
    tracing, finished = spans
    serve(tracing, status=400)
    serve(tracing, status=503)
    with pytest.raises(RuntimeError):
        serve(tracing, fault=RuntimeError("broken"))
    bad, busy, broken = finished()
    assert bad.attributes["error.type"] == "400" and bad.status.is_unset
    assert busy.attributes["error.type"] == "503" and not busy.status.is_ok
    assert busy.status.status_code.name == "ERROR"
    assert broken.attributes["error.type"] == "client_left" and broken.events[0].name == "exception"


def test_missing_packages_and_unknown_protocols_are_told(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "carrier-pigeon")
    with pytest.raises(ConfigError, match=r"carrier-pigeon.*grpc, http/protobuf"):
        Tracing("http://localhost:4317", "m")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint needs .* jaxllm\[otel\]"):
        Tracing("http://localhost:4317", "m")


@pytest.fixture
def collector():
    """(address, queue of what comes) of a collector that speaks OTLP over gRPC."""
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service

    received = queue.Queue()

    class Collector(service.TraceServiceServicer):
        def Export(self, request, context):  # noqa: N802
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        received.put(span)
            return messages.ExportTraceServiceResponse()

    server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
    service.add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"http://127.0.0.1:{port}", received
    server.stop(0)


def attributes(span):
    def plain(value):
        kind = value.WhichOneof("value")
        if kind == "array_value":
            return [plain(item) for item in value.array_value.values]
        return getattr(value, kind)

    return {item.key: plain(item.value) for item in span.attributes}


def test_a_server_sends_a_span_per_request(launch, collector, monkeypatch):
    address, received = collector
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", raising=False)
    server = launch("--otlp-traces-endpoint", address, "--served-model-name", "tiny")
    reply = server.client.post(
        "/v1/completions",
        json={"prompt": ["Hello", "You"], "n": 2, "max_tokens": 3, "ignore_eos": True},
        headers={"traceparent": PARENT},
    ).json()
    span = received.get(timeout=10)
    found = attributes(span)
    assert span.name == "text_completion tiny" and span.trace_id.hex() == PARENT.split("-")[1]
    assert found["gen_ai.response.id"] == reply["id"]
    assert found["gen_ai.usage.input_tokens"] == reply["usage"]["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == reply["usage"]["completion_tokens"] == 12
    assert found["gen_ai.response.finish_reasons"] == ["length"] * 4
    assert 0 < found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
    whole = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    assert found["gen_ai.latency.e2e"] <= whole < 10
    assert not {"Hello", "You"} & {str(value) for value in found.values()}
    server.stream(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    )
    assert server.post("/v1/completions", {"prompt": "x", "top_p": 0}).status_code == 400
    chat, bad = received.get(timeout=10), received.get(timeout=10)
    assert chat.name == "chat tiny" and attributes(chat)["http.response.status_code"] == 200
    assert "error.type" not in attributes(chat)
    assert attributes(bad)["error.type"] == "400"
    # What is left is sent when the server ends.
    server.complete(max_tokens=1)
    assert server.end() == 0
    assert received.get(timeout=10).name == "text_completion tiny"
    assert received.empty()


def test_a_collector_that_is_not_there_harms_nobody(launch, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    server = launch("--otlp-traces-endpoint", "http://127.0.0.1:9")
    server.complete(max_tokens=2)
    assert server.end(seconds=15) == 0


def test_grpc_calls_have_spans_too(launch, collector, monkeypatch):
    address, received = collector
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", raising=False)
    port = free_port()
    server = launch(
        "--otlp-traces-endpoint",
        address,
        f"--grpc-port={port}",
        "--served-model-name=tiny",
        stub={"step_seconds": 0.002, "raise_on": 250},
    )
    service = "jaxllm.Inference"

    def call(method, request):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            name = f"/{service}/{method}"
            make = channel.unary_stream if method == "GenerateStream" else channel.unary_unary
            answer = make(name, type(request).SerializeToString, pb.GenerateResponse.FromString)(
                request, wait_for_ready=True, timeout=10, metadata=[("traceparent", PARENT)]
            )
            try:
                return list(answer) if method == "GenerateStream" else answer
            except grpc.RpcError as error:
                return error

    sampling = {"max_tokens": 3, "n": 2, "temperature": 0.5, "ignore_eos": True}
    for method in ("Generate", "GenerateStream"):
        call(method, make_request("Hello", request_id="mine", **sampling))
        span = received.get(timeout=10)
        found = attributes(span)
        assert span.name == "text_completion tiny" and span.trace_id.hex() == PARENT.split("-")[1]
        assert span.parent_span_id.hex() == PARENT.split("-")[2]
        assert (found["rpc.system"], found["rpc.service"]) == ("grpc", service)
        assert (found["rpc.method"], found["rpc.grpc.status_code"]) == (method, 0)
        assert found["gen_ai.response.id"] == "mine"
        assert found["gen_ai.usage.output_tokens"] == 6
        assert found["gen_ai.response.finish_reasons"] == ["length"] * 2
        assert 0 < found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
        assert "error.type" not in found
    call("GenerateStream", make_request("Hello", temperature=-1.0))
    span = received.get(timeout=10)
    assert attributes(span)["error.type"] == "INVALID_ARGUMENT"
    assert span.status.code == 0
    call("GenerateStream", make_request([250], **sampling))
    span = received.get(timeout=10)
    assert attributes(span)["error.type"] == "engine_error"
    assert attributes(span)["rpc.grpc.status_code"] == grpc.StatusCode.INTERNAL.value[0]
    assert span.status.code == 2
    # A client that leaves; tokenizing is no generation and has no span.
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        name = f"/{service}/GenerateStream"
        make = channel.unary_stream(
            name, pb.GenerateRequest.SerializeToString, pb.GenerateChunk.FromString
        )
        stream = make(make_request("Hello", max_tokens=400, ignore_eos=True))
        next(stream)
        stream.cancel()
    assert attributes(received.get(timeout=10))["error.type"] == "client_left"
    server.wait_idle()
    with Client(f"127.0.0.1:{port}") as client:
        client.tokenize("Hello")
    with pytest.raises(queue.Empty):
        received.get(timeout=0.3)
