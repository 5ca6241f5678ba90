"""The listener for control, the block map and the diagnosis over HTTP."""

import socket
import stat
import threading
from pathlib import Path

import httpx
import pytest

from jaxllm.engine.block_pool import BlockPool
from serving.engine.block_map import block_runs

LONG = {"prompt": "Hello", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
READS = ("/is_paused", "/is_sleeping")
CONTROL = (
    *READS,
    *("/pause", "/resume", "/reset_prefix_cache", "/abort_requests", "/sleep", "/wake_up"),
)


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.fixture(scope="module")
def both(model_folder):
    from tests.serving.conftest import running_server

    port = free_port()
    with (
        running_server(
            model_folder,
            f"--admin-port={port}",
            "--admin-api-key=root",
            "--api-key=user",
            stub={"step_seconds": 0.005},
        ) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=10) as control,
    ):
        server.client.headers["authorization"] = "Bearer user"
        yield server, control


ROOT = {"authorization": "Bearer root"}


def test_control_needs_its_own_key_and_its_own_listener(both):
    server, control = both
    for path in CONTROL:
        method = "GET" if path in READS else "POST"
        for headers in ({}, {"authorization": "Bearer user"}):
            assert control.request(method, path, headers=headers).status_code == 401
        assert server.client.request(method, path, json={}, headers=ROOT).status_code == 401
        assert server.client.request(method, path, json={}).status_code == 404
    # Not even health is open there, and the API is not served.
    assert control.get("/health").status_code == 401
    assert control.post("/v1/completions", json=LONG, headers=ROOT).status_code == 404


def test_pause_and_resume(both):
    server, control = both
    assert control.post("/pause", headers=ROOT).status_code == 200
    assert control.get("/is_paused", headers=ROOT).json() == {"is_paused": True}
    found = []
    waiting = threading.Thread(target=lambda: found.append(server.complete(max_tokens=2)))
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    assert control.post("/resume", headers=ROOT).status_code == 200
    waiting.join(10)
    assert found[0]["usage"]["completion_tokens"] == 2


def test_abort_and_reset(both):
    server, control = both
    found = []
    body = {**LONG, "request_id": "victim"}
    running = threading.Thread(target=lambda: found.append(server.complete(**body)))
    running.start()
    while not server.metric("num_requests_running"):
        pass
    reset = "/reset_prefix_cache"
    assert control.post(reset, headers=ROOT).json() == {"done": False}
    forced = control.post(reset, params={"reset_running_requests": "true"}, headers=ROOT)
    assert forced.json() == {"done": True}
    assert control.post(reset, params={"reset_running_requests": "x"}, headers=ROOT).is_error
    ids = {"request_ids": ["cmpl-victim", "cmpl-nobody"]}
    assert control.post("/abort_requests", json=ids, headers=ROOT).json() == {"aborted": 1}
    running.join(10)
    assert found[0]["choices"][0]["finish_reason"] == "abort"
    server.wait_idle()
    assert control.get("/is_sleeping", headers=ROOT).json() == {"is_sleeping": False}
    assert control.post("/sleep", params={"level": "7"}, headers=ROOT).status_code == 400
    bad = control.post("/abort_requests", json={"request_ids": "x"}, headers=ROOT)
    assert bad.status_code == 400


def test_a_unix_socket_for_control_is_private(launch, tmp_path):
    path = tmp_path / "control"
    server = launch(f"--admin-uds={path}")
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
    transport = httpx.HTTPTransport(uds=str(path))
    with httpx.Client(transport=transport, base_url="http://control") as control:
        assert control.get("/is_paused").json() == {"is_paused": False}
    assert server.end() == 0
    assert not path.exists()


def test_the_block_map_counts_every_block(both):
    server, _ = both
    server.complete([5] * 100, max_tokens=1)
    server.wait_idle()
    body = server.get("/blocks").json()
    assert sum(body["counts"].values()) == 128
    assert body["counts"]["used"] == body["counts"]["shared"] == 0
    assert body["counts"]["cached"] >= 6
    assert sum(count for _, count in body["runs"]) == 128
    assert httpx.get(server.url + "/blocks", trust_env=False).status_code == 401


def test_runs_of_blocks():
    pool = BlockPool(9)
    assert block_runs(pool) == [("free", 8)]
    blocks = pool.take(4)
    pool.register(blocks[0], b"a")
    pool.register(blocks[1], b"b")
    pool.share(blocks[1:2])
    assert block_runs(pool) == [("used", 1), ("shared", 1), ("used", 2), ("free", 4)]
    pool.release(blocks)
    assert block_runs(pool) == [("cached", 1), ("used", 1), ("free", 6)]


def test_diagnosis_over_http(both):
    server, _ = both
    body = {"prompt": "x", "max_tokens": 300, "n": 8, "temperature": 1, "ignore_eos": True}
    ahead = [threading.Thread(target=server.complete, kwargs=body) for _ in range(2)]
    for thread in ahead:
        thread.start()
    while not server.metric("num_requests_waiting"):
        pass
    findings = server.get("/diagnose", params={"seconds": 0.1}).json()["findings"]
    # A busy machine may show more than this one.
    evidence = {each["name"]: each["evidence"] for each in findings}
    assert "8 of 8 places" in evidence["max_num_seqs is the limit"]
    for thread in ahead:
        thread.join()
    server.wait_idle()
    assert httpx.get(server.url + "/diagnose", trust_env=False).status_code == 401
