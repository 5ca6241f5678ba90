"""Start, loss and end of the two processes."""

import concurrent.futures
import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

from tests.serving.conftest import ROOT, is_alive

LONG = {"prompt": "Hello", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


def wait_for(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def status(server, path="/health"):
    return server.get(path).status_code


def test_loss_of_the_engine_and_its_return(launch):
    server = launch("--restart-engine=2", stub={"step_seconds": 0.01})
    (engine,) = server.children()
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        stream = threads.submit(server.stream, "/v1/completions", LONG)
        whole = threads.submit(server.post, "/v1/completions", LONG)
        wait_for(lambda: server.metric("num_requests_running") == 2, 5)
        os.kill(engine, signal.SIGKILL)
        killed = time.monotonic()
        chunks, reply = stream.result(5), whole.result(5)
        assert time.monotonic() - killed < 2
    assert "error" in chunks[-1]
    assert chunks[-1]["error"]["code"] == 500
    assert reply.status_code == 500
    server.wait_ready(20)
    assert server.complete(max_tokens=3)["usage"]["completion_tokens"] == 3
    assert server.get("/readyz").json()["restarts"] == 1
    assert server.metric("num_requests_running") == 0
    # A stopped engine is noticed, and used again when it goes on.
    (engine,) = server.children()
    os.kill(engine, signal.SIGSTOP)
    wait_for(lambda: status(server) == 503, 12)
    assert status(server, "/livez") == 200
    os.kill(engine, signal.SIGCONT)
    wait_for(lambda: status(server) == 200, 3)
    # Without the API process there is no engine.
    server.process.kill()
    wait_for(lambda: not is_alive(engine), 2)


def test_an_engine_that_hangs_is_replaced(launch):
    server = launch("--hang-timeout=1.5", stub={"hang_on": 200})
    (engine,) = server.children()
    began = time.monotonic()
    reply = server.post("/v1/completions", {"prompt": [200, 5], "max_tokens": 2})
    assert reply.status_code == 500
    assert reply.headers["x-should-retry"] == "false"
    assert time.monotonic() - began < 6
    assert not is_alive(engine)
    server.wait_ready(20)
    server.complete(max_tokens=1)


def test_a_lost_engine_that_is_not_replaced_ends_the_server(launch):
    server = launch("--restart-engine=0", stub={"exit_on": 201})
    reply = server.post("/v1/completions", {"prompt": [201], "max_tokens": 2})
    assert reply.status_code == 500
    assert server.process.wait(10) == 70


def test_drain(launch):
    server = launch("--shutdown-timeout=20", stub={"step_seconds": 0.005})
    (engine,) = server.children()
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        streams = [
            threads.submit(server.stream, "/v1/completions", {**LONG, "max_tokens": 200})
            for _ in range(4)
        ]
        wait_for(lambda: server.metric("num_requests_running") == 4, 5)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        assert status(server, "/readyz") == 503
        assert server.post("/v1/completions", LONG).status_code == 503
        for stream in streams:
            chunks = stream.result(20)
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(5) == 0
    assert not is_alive(engine)


def test_the_time_to_drain_is_limited_and_a_second_signal_ends_at_once(launch):
    server = launch("--shutdown-timeout=0.3", stub={"step_seconds": 0.02})
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        stream = threads.submit(server.stream, "/v1/completions", LONG)
        wait_for(lambda: server.metric("num_requests_running") == 1, 5)
        assert server.end() == 3
        assert stream.result(5)[-1]["error"]["code"] == 503
    server = launch("--shutdown-timeout=60", stub={"step_seconds": 0.05})
    (engine,) = server.children()
    with server.client.stream("POST", "/v1/completions", json={**LONG, "stream": True}):
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert server.process.poll() is None
        assert server.end(seconds=2) == 143
    wait_for(lambda: not is_alive(engine), 2)


def test_before_the_engine_is_ready(launch):
    server = launch(wait=False, stub={"start_seconds": 30})
    wait_for(lambda: _answers(server), 10)
    assert status(server, "/livez") == 200
    assert status(server, "/health") == 503
    assert server.get("/readyz").json()["state"] == "starting"
    for path in ("/v1/models", "/tokenizer_info"):
        assert status(server, path) == 503
    assert server.post("/v1/completions", LONG).headers["retry-after"]
    assert server.end(seconds=5) == 0


def _answers(server):
    try:
        return server.get("/livez").status_code == 200
    except httpx.TransportError:
        return False


def test_what_keeps_the_engine_from_starting_is_said_in_one_line(launch):
    server = launch(wait=False, stub={"start_error": "no such tensor: model.norm"})
    assert server.process.wait(20) == 2
    lines = [line for line in server.log.read_text().splitlines() if "no such tensor" in line]
    assert len(lines) == 1
    assert "Traceback" not in server.log.read_text()


def test_a_port_in_use_ends_before_the_model_loads(model_folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "serving.commands",
                "serve",
                str(model_folder),
                f"--port={port}",
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=30,
        )
    assert done.returncode == 2
    assert f"cannot listen at 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "flags", [["--tool-call-parser=x"], ["--port=99999"], ["--root-path=x"], ["--max-body-size=0"]]
)
def test_bad_settings(model_folder, flags):
    from serving.commands import main

    assert main(["serve", str(model_folder), *flags]) == 2
