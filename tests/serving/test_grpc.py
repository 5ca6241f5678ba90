"""The gRPC service against an engine made of Python, called through its own description."""

import asyncio
import importlib.util
import socket
import subprocess
import sys
import threading
import time

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from jaxllm.client import AsyncClient, Client, RequestError
from serving.grpc import messages as pb
from tests.serving.conftest import ROOT, running_server


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.fixture(scope="module")
def served(model_folder):
    port = free_port()
    with running_server(
        model_folder, f"--grpc-port={port}", stub={"step_seconds": 0.002, "raise_on": 250}
    ) as running:
        yield running, f"127.0.0.1:{port}"


@pytest.fixture
def client(served):
    with Client(served[1], timeout=20) as made:
        yield made


def test_the_description_is_current(tmp_path):
    if importlib.util.find_spec("grpc_tools") is None:
        pytest.skip("grpcio-tools is not installed")
    fresh = tmp_path / "fresh.binpb"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--descriptor_set_out={fresh}"]
    command += [f"--pyi_out={tmp_path}", pb.FILE]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    kept = descriptor_pb2.FileDescriptorSet.FromString(
        (ROOT / "serving/grpc/jaxllm.binpb").read_bytes()
    )
    assert kept == descriptor_pb2.FileDescriptorSet.FromString(fresh.read_bytes())
    types = (tmp_path / "serving/grpc/jaxllm_pb2.pyi").read_text()
    assert types in (ROOT / "serving/grpc/messages.pyi").read_text()


def test_generate_as_over_http(served, client):
    server, _ = served
    want = server.complete("Hello", max_tokens=6, temperature=0, ignore_eos=True)
    reply = client.generate("Hello", max_tokens=6, temperature=0, ignore_eos=True, logprobs=2)
    (sample,) = reply.samples
    assert sample.text == want["choices"][0]["text"]
    assert sample.finish.reason == "length"
    assert len(sample.logprobs) == 6
    assert len(sample.logprobs[0].others) == 1
    assert len(reply.prompt.token_ids) == want["usage"]["prompt_tokens"]


def test_stream_joins_to_the_whole(client):
    options = {"max_tokens": 12, "temperature": 0.9, "seed": 4, "n": 2, "ignore_eos": True}
    whole = client.generate([5, 6, 7], **options)
    text, prompts, finishes = ["", ""], 0, 0
    for chunk in client.stream([5, 6, 7], **options):
        text[chunk.sample.index] += chunk.sample.text
        prompts += chunk.HasField("prompt")
        finishes += chunk.sample.HasField("finish")
    assert text == [sample.text for sample in whole.samples]
    assert (prompts, finishes) == (1, 2)


def test_stop_strings_and_ids(client):
    (x,) = client.tokenize("x")
    reply = client.generate("a", max_tokens=9, temperature=0, stop=["xx"], logit_bias={x: 100})
    assert reply.samples[0].finish.stop_string == "xx"
    reply = client.generate(
        "a", max_tokens=9, temperature=0, stop_token_ids=[x], logit_bias={x: 100}
    )
    assert reply.samples[0].finish.stop_token_id == x


def test_score_and_tokens(client):
    ids = client.tokenize("the an")
    assert client.detokenize(ids) == "the an"
    score = client.score("Hello", " there")
    assert list(score.token_ids) == client.tokenize(" there")
    assert score.total == pytest.approx(-0.5 * len(score.token_ids))


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ("", {}),
        ("x", {"temperature": 3.0}),
        ("x", {"max_tokens": 0}),
        ("x", {"stop_token_ids": [99999]}),
        ("x", {"logprobs": -1}),
        ("x", {"prompt_logprobs": -1}),
        ([5] * 600, {}),
        ([300], {}),
    ],
)
def test_bad_requests(client, prompt, options):
    with pytest.raises(RequestError) as caught:
        client.generate(prompt, **options)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_a_failed_step_and_an_unknown_model_are_told_apart(client):
    with pytest.raises(RequestError) as caught:
        client.generate([250], max_tokens=2)
    assert caught.value.code is grpc.StatusCode.INTERNAL


def test_deadlines_and_cancels_end_requests(served, client):
    server, address = served
    with Client(address, timeout=0.2) as hasty, pytest.raises(RequestError) as caught:
        hasty.generate("Hello", max_tokens=400, ignore_eos=True)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    stream = client.stream("Hello", max_tokens=400, ignore_eos=True)
    next(stream)
    stream.close()
    server.wait_idle(3)


def test_abort_by_id(served, client):
    finishes = []

    def run():
        for chunk in client.stream("Hello", request_id="mine", max_tokens=400, ignore_eos=True):
            if chunk.sample.HasField("finish"):
                finishes.append(chunk.sample.finish.reason)

    thread = threading.Thread(target=run)
    thread.start()
    deadline = time.monotonic() + 10
    while not client.abort(["mine", "other"]):
        assert time.monotonic() < deadline
    thread.join(10)
    assert finishes == ["abort"]
    served[0].wait_idle(3)


def test_pause_and_resume(served, client):
    client.pause()
    try:
        with Client(served[1], timeout=0.5) as hasty, pytest.raises(RequestError):
            hasty.generate("Hello", max_tokens=2)
    finally:
        client.resume()
    assert client.generate("Hello", max_tokens=2).samples
    assert client.reset_prefix_cache()


def test_information(served, client):
    info = client.server_info()
    assert info.ready
    model = client.model_info()
    assert model.max_model_len == 512
    assert list(model.eos_token_ids) == [1]


def test_health_and_reflection(served):
    with grpc.insecure_channel(served[1]) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "jaxllm.Inference"):
            reply = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {"jaxllm.Inference", "jaxllm.Control"} <= set(database.get_services())


def test_keys(launch):
    port = free_port()
    launch(f"--grpc-port={port}", "--api-key=secret")
    with Client(f"127.0.0.1:{port}", timeout=10) as none, pytest.raises(RequestError) as caught:
        none.server_info()
    assert caught.value.code is grpc.StatusCode.UNAUTHENTICATED
    with Client(f"127.0.0.1:{port}", api_key="secret", timeout=10) as good:
        assert good.generate("x", max_tokens=1).samples


@pytest.mark.parametrize("isolation", ["auto", "none"])
def test_tenants_share_no_prefix(launch, isolation):
    port = free_port()
    server = launch(
        f"--grpc-port={port}",
        *("--api-key", "one", "two"),
        f"--cache-isolation={isolation}",
        "--enable-prompt-tokens-details",
    )
    # Four blocks, of which the last is computed in any case.
    prompt = [7] * 64

    def cached(key, **options):
        with Client(f"127.0.0.1:{port}", api_key=key, timeout=20) as client:
            return client.generate(prompt, max_tokens=1, **options).prompt.num_cached_tokens

    def cached_over_http(key):
        server.client.headers["authorization"] = f"Bearer {key}"
        usage = server.complete(prompt, max_tokens=1)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    shared = 0 if isolation == "auto" else 48
    assert [cached("one"), cached("one"), cached("two"), cached("two")] == [0, 48, shared, 48]
    assert [cached("one", cache_salt="s"), cached("one", cache_salt="s")] == [0, 48]
    assert cached("two", cache_salt="s") == shared
    # A tenant is the same one over HTTP.
    assert cached_over_http("one") == 48
    with pytest.raises(RequestError) as caught:
        cached("one", cache_salt="a/b")
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_the_asynchronous_client(served, client):
    async def run():
        async with AsyncClient(served[1], timeout=20) as aio:
            options = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
            text = "".join([c.sample.text async for c in aio.stream("Hello", **options)])
            whole = await aio.generate("Hello", **options)
            ids = await aio.tokenize("the an")
            scored = await aio.score("Hello", " there")
            await aio.pause()
            await aio.resume()
            return (
                text == whole.samples[0].text,
                await aio.detokenize(ids),
                scored.total == client.score("Hello", " there").total,
                await aio.abort(["nobody"]),
                await aio.reset_prefix_cache(),
                (await aio.server_info()).ready,
                (await aio.model_info()).max_model_len,
            )

    assert asyncio.run(run()) == (True, "the an", True, 0, True, True, 512)


def test_weights_are_out_of_reach_unless_allowed(client):
    for call in (client.sleep, client.wake_up, lambda: client.update_weights({})):
        with pytest.raises(RequestError, match="enable-weight-control") as caught:
            call()
        assert caught.value.code is grpc.StatusCode.PERMISSION_DENIED


def test_clients_try_again_while_nobody_is_there(monkeypatch):
    waits = []
    monkeypatch.setattr("serving.grpc.client.time.sleep", waits.append)
    with Client(f"127.0.0.1:{free_port()}", timeout=2, retries=3) as absent:
        with pytest.raises(RequestError):
            absent.server_info()
        with pytest.raises(RequestError):
            list(absent.stream("x"))
    assert len(waits) == 6
    assert all(
        0.05 * 2**i <= wait <= 0.15 * 2**i for i, wait in zip([0, 1, 2] * 2, waits, strict=True)
    )


def test_a_server_that_is_not_there():
    absent = Client(f"127.0.0.1:{free_port()}", timeout=2, retries=1)
    with absent, pytest.raises(RequestError) as caught:
        absent.server_info()
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
