"""Each trouble, made on purpose, is found and named."""

import concurrent.futures
import time

import pytest

from serving.commands import main
from serving.diagnose import Diagnosis, Sample, fetch, parse
from serving.errors import ServingError


def sample(settings=None, buckets=None, **values):
    named = {
        (name if name.startswith("jaxllm") else f"vllm:{name}"): v for name, v in values.items()
    }
    return Sample(
        named, buckets or {}, {"max_num_seqs": "8", "block_size": "16", **(settings or {})}
    )


CALM = sample()


def names(after, before=CALM, **options):
    return [finding.name for finding in Diagnosis(before, after, **options).findings()]


def test_nothing_is_found_where_nothing_is():
    assert names(CALM) == []
    busy = sample(num_requests_running=8, kv_cache_usage_perc=0.5)
    assert names(busy) == []


@pytest.mark.parametrize(
    ("values", "name"),
    [
        (
            {"num_requests_running": 8, "num_requests_waiting": 5, "kv_cache_usage_perc": 0.2},
            "max_num_seqs is the limit",
        ),
        (
            {"num_requests_running": 3, "num_requests_waiting": 5, "kv_cache_usage_perc": 0.97},
            "KV memory is the limit",
        ),
        ({"num_preemptions_total": 9, "request_success_total": 10}, "preemption storm"),
        (
            {"request_queue_time_seconds_sum": 30, "request_queue_time_seconds_count": 10},
            "queue time over its target",
        ),
        (
            {
                "prefix_cache_queries_total": 5000,
                "prefix_cache_hits_total": 10,
                "prompt_tokens_total": 5000,
                "request_prompt_tokens_count": 10,
            },
            "low prefix hit rate",
        ),
    ],
)
def test_each_trouble_shows_in_its_numbers(values, name):
    assert names(sample(**values)) == [name]


def test_recompiles_spikes_and_a_cache_that_is_off():
    recompiled = Sample({"jaxllm:recompilations_total": 3.0}, {}, {})
    assert names(recompiled) == ["recompiles"]
    gaps = {"vllm:inter_token_latency_seconds": {0.01: 900.0, 0.1: 950.0, 0.5: 1000.0}}
    assert names(sample(buckets=gaps)) == ["latency spikes from prefill"]
    even = {"vllm:inter_token_latency_seconds": {0.01: 0.0, 0.1: 995.0, 0.5: 1000.0}}
    assert names(sample(buckets=even)) == []
    off = sample({"enable_prefix_caching": "False"}, prompt_tokens_total=5000)
    assert names(off) == ["no prefix cache"]


def test_short_prompts_are_told_from_different_ones():
    values = {"prefix_cache_queries_total": 2000, "prompt_tokens_total": 2000}
    short = Diagnosis(CALM, sample(request_prompt_tokens_count=200, **values)).findings()
    assert "block-size" in short[0].advice
    long = Diagnosis(CALM, sample(request_prompt_tokens_count=4, **values)).findings()
    assert "first" in long[0].advice


def test_pages():
    with pytest.raises(ServingError):
        parse("<html>")
    with pytest.raises(ServingError):
        fetch("http://127.0.0.1:1")
    with pytest.raises(ServingError):
        fetch("file:///etc/passwd")


def test_a_server_with_too_few_places(launch, capsys):
    server = launch("--max-num-seqs=2", stub={"step_seconds": 0.01})
    before = fetch(server.url)
    body = {"prompt": "Hello", "max_tokens": 200, "ignore_eos": True}
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        jobs = [threads.submit(server.post, "/v1/completions", body) for _ in range(8)]
        deadline = time.monotonic() + 10
        while "max_num_seqs is the limit" not in names(fetch(server.url), before):
            assert time.monotonic() < deadline
        assert main(["diagnose", server.url, "--seconds=0.2"]) == 1
        assert "raise --max-num-seqs above 2" in capsys.readouterr().out
        for job in jobs:
            assert job.result(30).status_code == 200
    assert main(["diagnose", server.url, "--seconds=0.1"]) == 0


def test_a_server_with_too_little_memory(launch):
    # 19 blocks of 16 tokens for 8 requests of about 100.
    server = launch("--num-blocks=20", "--max-model-len=200", stub={"step_seconds": 0.002})
    before = fetch(server.url)
    body = {"max_tokens": 100, "ignore_eos": True}
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        list(
            threads.map(
                lambda i: server.post("/v1/completions", {"prompt": f"request {i}", **body}),
                range(8),
            )
        )
    assert "preemption storm" in names(fetch(server.url), before)
    server.wait_idle()
