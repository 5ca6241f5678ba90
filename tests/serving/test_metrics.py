"""Metrics under vLLM's names, and that they agree with what was served."""

from serving.metrics import Metrics, RequestTimes, token_buckets
from tests.serving.descriptions import description

GREEDY = {"temperature": 0, "ignore_eos": True}
COUNTERS = (
    "prompt_tokens_total",
    "generation_tokens_total",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "e2e_request_latency_seconds_count",
    "iteration_tokens_total_sum",
    "iteration_tokens_total_count",
    "request_params_n_count",
    "request_params_max_tokens_sum",
    "request_queue_time_seconds_count",
    "request_prompt_tokens_sum",
)


def test_ten_requests_of_ten_tokens(server):
    server.wait_idle()
    before = {name: server.metric(name) for name in COUNTERS}
    success = server.metric("request_success_total", finished_reason="length")
    for i in range(10):
        server.complete(f"Hello {i}", max_tokens=10, **GREEDY)
    server.wait_idle()
    rise = {name: server.metric(name) - before[name] for name in COUNTERS}
    assert rise == {
        "prompt_tokens_total": 70,
        "generation_tokens_total": 100,
        "time_to_first_token_seconds_count": 10,
        "inter_token_latency_seconds_count": 90,
        "e2e_request_latency_seconds_count": 10,
        "iteration_tokens_total_sum": 170,
        "iteration_tokens_total_count": 100,
        "request_params_n_count": 10,
        "request_params_max_tokens_sum": 100,
        "request_queue_time_seconds_count": 10,
        "request_prompt_tokens_sum": 70,
    }
    assert server.metric("request_success_total", finished_reason="length") - success == 10


def test_the_names_of_dashboards_are_there(server):
    server.complete(max_tokens=1)
    page = server.get("/metrics").text
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "cache_config_info",
        "num_preemptions_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "request_prefill_time_seconds_bucket",
        "request_decode_time_seconds_bucket",
        "request_inference_time_seconds_bucket",
        "request_generation_tokens_bucket",
        "request_time_per_output_token_seconds_bucket",
    ):
        assert f"\nvllm:{name}{{" in page, name
    assert 'model_name="tiny"' in page
    assert 'block_size="16"' in page
    typed = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}
    helped = {line.split()[2] for line in page.splitlines() if line.startswith("# HELP")}
    assert typed == helped
    assert 'http_requests_total{handler="/v1/completions"' in page


def test_a_refused_request_counts_no_tokens(server):
    names = ("prompt_tokens_total", "generation_tokens_total")
    before = [server.metric(name) for name in names]
    assert server.post("/v1/completions", {"prompt": "x", "top_p": 0}).status_code == 400
    assert [server.metric(name) for name in names] == before


def test_times_follow_their_definitions():
    from jaxllm.sampling_params import SamplingParams

    metrics = Metrics("m")

    metrics.describe(description())
    times = RequestTimes(10.0, 7, SamplingParams(max_tokens=3))
    times.scheduled = 12.0
    assert metrics.record_tokens(times, 1, 15.0) == 8
    assert metrics.record_tokens(times, 1, 16.0) == 1
    assert metrics.record_tokens(times, 1, 19.0) == 1
    metrics.finish(times, "length", 19.0)

    def total(name):
        return metrics.registry.get_sample_value(
            f"vllm:{name}_sum", {"model_name": "m", "engine": "0"}
        )

    assert total("time_to_first_token_seconds") == 5
    assert total("request_queue_time_seconds") == 2
    assert total("request_prefill_time_seconds") == 3
    assert total("request_decode_time_seconds") == 4
    assert total("request_inference_time_seconds") == 7
    assert total("e2e_request_latency_seconds") == 9
    assert total("inter_token_latency_seconds") == 4
    assert total("request_time_per_output_token_seconds") == 2


def test_token_buckets():
    assert token_buckets(100) == [1, 2, 5, 10, 20, 50, 100]
    assert token_buckets(49) == [1, 2, 5, 10, 20]
