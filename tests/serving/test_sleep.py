"""Sleep and wake-up through the listener for control, with the real engine on a tiny model."""

import threading

import httpx
import pytest

from tests.serving.conftest import running_server
from tests.serving.test_grpc import free_port

GREEDY = {"temperature": 0, "ignore_eos": True}
LONG = {"prompt": "Hello", "max_tokens": 300, **GREEDY}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def both(model_folder):
    port = free_port()
    flags = [
        f"--admin-port={port}",
        "--max-num-seqs=4",
        "--max-num-batched-tokens=32",
        "--enforce-eager",
        "--attention-backend=xla",
    ]
    with (
        running_server(
            model_folder, *flags, module="serving.commands", ready_seconds=300
        ) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as control,
    ):
        yield server, control


def post(control, path, status=200, **params):
    reply = control.post(path, params=params)
    assert reply.status_code == status, reply.text
    return reply


def sleeps(control):
    return control.get("/is_sleeping").json()["is_sleeping"]


def greedy(server):
    return server.complete(max_tokens=12, **GREEDY)["choices"][0]["text"]


def check_asleep(server):
    """A request is refused with the reason at once, and the server says that it is not ready."""
    for path, body in (
        ("/v1/completions", LONG),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    ):
        for stream in (False, True):
            reply = server.post(path, {**body, "stream": stream})
            assert reply.status_code == 503
            assert "sleeps; wake it up first" in reply.json()["error"]["message"]
            assert int(reply.headers["retry-after"]) > 0
    ready = server.get("/readyz")
    assert ready.status_code == 503 and "sleeps" in ready.json()["reason"]
    assert server.get("/livez").status_code == 200


def test_the_same_text_after_a_sleep(both):
    server, control = both
    before = greedy(server)
    assert not sleeps(control)
    post(control, "/sleep")
    assert sleeps(control)
    check_asleep(server)
    # As in vLLM, what is asleep may be told to sleep.
    post(control, "/sleep", level=1)
    assert sleeps(control)
    post(control, "/wake_up")
    assert not sleeps(control)
    assert server.get("/readyz").status_code == 200
    assert greedy(server) == before
    # And what is awake to wake up.
    post(control, "/wake_up")
    assert greedy(server) == before
    server.wait_idle()


def test_it_wakes_part_by_part(both):
    server, control = both
    before = greedy(server)
    post(control, "/sleep", level=1)
    post(control, "/wake_up", tags="weights")
    assert sleeps(control)
    check_asleep(server)
    post(control, "/wake_up", tags="kv_cache")
    assert not sleeps(control)
    assert greedy(server) == before


def test_wrong_values_change_nothing(both):
    server, control = both
    before = greedy(server)
    for path, params, message in (
        ("/sleep", {"level": "3"}, "one of 1, 2"),
        ("/sleep", {"mode": "deep"}, "refuse, abort, recompute"),
        ("/wake_up", {"tags": "pool"}, "pool"),
    ):
        assert message in post(control, path, 400, **params).json()["error"]["message"]
        assert not sleeps(control)
    assert greedy(server) == before


@pytest.mark.parametrize("mode", ["refuse", "abort", "recompute"])
def test_a_request_that_runs(both, mode):
    server, control = both
    whole = server.complete(**LONG)["choices"][0]
    found = []
    running = threading.Thread(target=lambda: found.append(server.complete(**LONG)["choices"][0]))
    running.start()
    while not server.metric("num_requests_running"):
        pass
    if mode == "refuse":
        reply = post(control, "/sleep", 409, mode=mode)
        assert "1 unfinished" in reply.json()["error"]["message"]
        assert not sleeps(control)
    else:
        post(control, "/sleep", mode=mode)
        assert sleeps(control)
        running.join(0.5)
        # Aborted ones have ended, the others wait for the wake-up.
        assert running.is_alive() is (mode == "recompute")
        post(control, "/wake_up")
    running.join(30)
    if mode == "abort":
        assert found[0]["finish_reason"] == "abort"
        assert whole["text"].startswith(found[0]["text"])
    else:
        assert found == [whole]
    server.wait_idle()


def test_weights_that_were_dropped_do_not_come_back(both):
    """The last test: nothing brings them back over HTTP."""
    server, control = both
    post(control, "/sleep", level=2)
    check_asleep(server)
    reply = post(control, "/wake_up", 409)
    assert "level 2" in reply.json()["error"]["message"]
    assert sleeps(control)
    check_asleep(server)
