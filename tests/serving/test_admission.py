"""Admission control: in the unit, and at the door of a server."""

import concurrent.futures
import time

import pytest

from serving.admission import Admission, AdmissionLimits
from serving.errors import OverloadedError


def admission(**limits):
    made = Admission(AdmissionLimits(**limits))
    made.max_num_seqs = 2
    return made


def queue(made, count, tokens=10, start=0):
    for i in range(start, start + count):
        made.admit(1, tokens)
        made.queue(str(i), tokens)


def test_free_places_are_not_counted_as_queue():
    made = admission(max_num_queued_reqs=3)
    queue(made, 5)
    with pytest.raises(OverloadedError) as caught:
        made.admit(1, 10)
    assert caught.value.reason == "max_num_queued_reqs"
    assert caught.value.retry_after >= 1
    made.start("0", time.monotonic())
    made.end("0")
    made.admit(1, 10)


def test_samples_count_one_each_and_are_let_in_all_or_none():
    made = admission(max_num_queued_reqs=3)
    with pytest.raises(OverloadedError):
        made.admit(6, 60)
    made.admit(5, 50)


def test_tokens():
    made = admission(max_num_queued_tokens=25)
    queue(made, 2)
    with pytest.raises(OverloadedError) as caught:
        made.admit(1, 10)
    assert caught.value.reason == "max_num_queued_tokens"


def test_estimated_wait():
    made = admission(max_queue_time=5.0)
    now = time.monotonic()
    for i in range(10):
        made.queue(f"done {i}", 1)
        # One admission a second.
        made.start(f"done {i}", now - 10 + i)
    for i in range(8):
        made.end(f"done {i}")
    queue(made, 4)
    with pytest.raises(OverloadedError) as caught:
        made.admit(2, 2)
    assert caught.value.reason == "max_queue_time"


def test_a_server_refuses_early_and_serves_the_rest(launch):
    server = launch("--max-num-seqs=2", "--max-num-queued-reqs=2", stub={"step_seconds": 0.01})
    body = {"prompt": "Hello", "max_tokens": 60, "ignore_eos": True}

    def ask(i):
        began = time.monotonic()
        return server.post("/v1/completions", {**body, "stream": bool(i % 2)}), began

    with concurrent.futures.ThreadPoolExecutor(20) as threads:
        replies = [reply for reply, _ in threads.map(ask, range(20))]
    counts = {code: sum(r.status_code == code for r in replies) for code in (200, 503)}
    assert sum(counts.values()) == 20
    assert counts[200] >= 4
    assert counts[503] >= 10
    refused = [r for r in replies if r.status_code == 503]
    assert all(int(r.headers["retry-after"]) >= 1 for r in refused)
    assert all("json" in r.headers["content-type"] for r in refused)
    rejected = server.metric("admission_rejections_total", reason="max_num_queued_reqs")
    assert rejected == counts[503]
    server.wait_idle()
