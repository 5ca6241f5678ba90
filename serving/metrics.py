"""Prometheus metrics under vLLM's names, labels, buckets and definitions of time.

queue = arrival to first scheduled; prefill = first scheduled to first token; decode = first to last
token; inference = first scheduled to last token; time to first token counts from arrival. A
preemption does not start any of them anew.
"""

import dataclasses

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from jaxllm.sampling_params import SamplingParams
from serving.engine.messages import Description, Stats

_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_PER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_HTTP = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_NAMES = ("model_name", "engine")


def token_buckets(limit: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... up to `limit`."""
    buckets = []
    power = 1
    while power <= limit:
        buckets += [factor * power for factor in (1, 2, 5) if factor * power <= limit]
        power *= 10
    return buckets


@dataclasses.dataclass(slots=True)
class RequestTimes:
    """Times and counts of one sequence; times are monotonic seconds, None until they come.

    Attributes:
      is_first_sample: of the n samples of its prompt, the one that stands for the parameters.
      finish_reason: None while it runs.
    """

    arrival: float
    num_prompt_tokens: int
    params: SamplingParams
    is_first_sample: bool = True
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    num_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    finish_reason: str | None = None


@dataclasses.dataclass(slots=True)
class Totals:
    """Tokens since the start."""

    prompt_tokens: int = 0
    generation_tokens: int = 0


class Metrics:
    """All series of one server, in a registry of their own."""

    def __init__(self, model_name: str):
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._last = Stats()
        self.totals = Totals()
        gauge, counter = self._gauge, self._counter
        self.running = gauge("num_requests_running", "Sequences that run.")
        self.waiting = gauge("num_requests_waiting", "Sequences that wait to be scheduled.")
        self.kv_usage = gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")
        by_reason = Gauge(
            "vllm:num_requests_waiting_by_reason",
            "Sequences that wait, by reason.",
            [*_NAMES, "reason"],
            registry=self.registry,
        )
        self.waiting_capacity = by_reason.labels(**self._labels, reason="capacity")
        by_reason.labels(**self._labels, reason="deferred").set(0)
        self.preemptions = counter("num_preemptions", "Preemptions by the scheduler.")
        self.prefix_queries = counter("prefix_cache_queries", "Tokens looked up in the cache.")
        self.prefix_hits = counter("prefix_cache_hits", "Tokens found in the prefix cache.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens processed.")
        self.prompt_tokens_cached = counter("prompt_tokens_cached", "Prompt tokens not computed.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        by_source = Counter(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by where their K/V came from.",
            [*_NAMES, "source"],
            registry=self.registry,
        )
        self.prompt_computed = by_source.labels(**self._labels, source="local_compute")
        self.prompt_cached = by_source.labels(**self._labels, source="local_cache_hit")
        success = Counter(
            "vllm:request_success",
            "Finished sequences, by reason.",
            [*_NAMES, "finished_reason"],
            registry=self.registry,
        )
        self.success = {
            reason: success.labels(**self._labels, finished_reason=reason)
            for reason in ("stop", "length", "abort", "error", "repetition")
        }
        self._rejections = Counter(
            "vllm:admission_rejections",
            "Requests refused at the door, by reason.",
            ["model_name", "reason"],
            registry=self.registry,
        )
        self.compilations = Counter(
            "jaxllm:recompilations",
            "Programs compiled after the engine was ready.",
            _NAMES,
            registry=self.registry,
        ).labels(**self._labels)
        histogram = self._histogram
        self.first_token = histogram(
            "time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds", "Time between tokens of a sequence.", _PER_TOKEN
        )
        self.per_output_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean time per token after the first.",
            _PER_TOKEN,
        )
        self.e2e = histogram("e2e_request_latency_seconds", "Arrival to end.", _REQUEST)
        self.queue_time = histogram("request_queue_time_seconds", "Time waiting.", _REQUEST)
        self.prefill_time = histogram(
            "request_prefill_time_seconds", "Scheduled to first token.", _REQUEST
        )
        self.decode_time = histogram(
            "request_decode_time_seconds", "First to last token.", _REQUEST
        )
        self.inference_time = histogram(
            "request_inference_time_seconds", "Scheduled to last token.", _REQUEST
        )
        self.iteration_tokens = histogram(
            "iteration_tokens_total", "Prompt and output tokens of a step.", _ITERATION
        )
        self.params_n = histogram("request_params_n", "The parameter n.", (1, 2, 5, 10, 20))
        self.num_preemptions_per_request = histogram(
            "request_num_preemptions", "Preemptions of a sequence.", (1, 2, 3, 4, 5, 10, 20)
        )
        http_labels = ["handler", "method", "status"]
        self.http_requests = Counter(
            "http_requests", "HTTP requests.", http_labels, registry=self.registry
        )
        self.http_seconds = Histogram(
            "http_request_duration_seconds",
            "Duration of HTTP requests.",
            ["handler", "method"],
            buckets=_HTTP,
            registry=self.registry,
        )

    def describe(self, engine: Description) -> None:
        """Adds the series that need to know the engine."""
        buckets = token_buckets(engine.max_model_len)
        histogram = self._histogram
        self.request_prompt = histogram("request_prompt_tokens", "Prompt tokens.", buckets)
        self.request_generation = histogram("request_generation_tokens", "Output tokens.", buckets)
        self.request_max_generation = histogram(
            "request_max_num_generation_tokens",
            "Most output tokens of a request's samples.",
            buckets,
        )
        self.params_max_tokens = histogram(
            "request_params_max_tokens", "The parameter max_tokens.", buckets
        )
        self.prefill_computed = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens that were computed.", buckets
        )
        fields = {
            **engine.config,
            "block_size": engine.block_size,
            "num_gpu_blocks": engine.num_blocks,
            "kv_cache_size_tokens": (engine.num_blocks - 1) * engine.block_size,
            "kv_cache_max_concurrency": round(
                (engine.num_blocks - 1) * engine.block_size / engine.max_model_len, 2
            ),
            "max_num_seqs": engine.max_num_seqs,
            "max_num_batched_tokens": engine.max_num_batched_tokens,
            "max_model_len": engine.max_model_len,
            "cache_dtype": engine.config.get("kv_cache_dtype"),
        }
        for path in ("model", "tokenizer", "compilation_cache_dir"):
            # Where files lie is nobody's business who only may read metrics.
            fields.pop(path, None)
        labels = {name: str(value) for name, value in sorted(fields.items())}
        Gauge(
            "vllm:cache_config_info",
            "Settings of the KV cache.",
            ["engine", *labels],
            registry=self.registry,
        ).labels(engine="0", **labels).set(1)

    def render(self) -> bytes:
        """The page of `/metrics`, in Prometheus' text format."""
        return prometheus_client.generate_latest(self.registry)

    def record_step(self, stats: Stats) -> None:
        """Gauges and counters of the engine after a step."""
        last, self._last = self._last, stats
        self.running.set(stats.num_running)
        self.waiting.set(stats.num_waiting)
        self.waiting_capacity.set(stats.num_waiting)
        self.kv_usage.set(stats.kv_usage)
        for series, now, before in (
            (self.preemptions, stats.num_preemptions, last.num_preemptions),
            (self.prefix_queries, stats.prefix_queries, last.prefix_queries),
            (self.prefix_hits, stats.prefix_hits, last.prefix_hits),
            (self.compilations, stats.num_compiled, last.num_compiled),
        ):
            if now > before:
                series.inc(now - before)

    @property
    def last_stats(self) -> Stats:
        return self._last

    def engine_lost(self) -> None:
        """A new engine counts from zero."""
        self._last = Stats()
        for gauge in (self.running, self.waiting, self.waiting_capacity, self.kv_usage):
            gauge.set(0)

    def record_tokens(self, times: RequestTimes, count: int, now: float) -> int:
        """New tokens of a sequence; returns what they add to the step's tokens."""
        if not count:
            return 0
        prompt = 0
        if times.first_token is None:
            times.first_token = now
            prompt = times.num_prompt_tokens
            self.first_token.observe(now - times.arrival)
            self.prompt_tokens.inc(prompt)
            self.totals.prompt_tokens += prompt
            self.prompt_tokens_cached.inc(times.num_cached_tokens)
            self.prompt_cached.inc(times.num_cached_tokens)
            self.prompt_computed.inc(prompt - times.num_cached_tokens)
        elif times.last_token is not None:
            self.inter_token.observe(now - times.last_token)
        times.last_token = now
        times.num_tokens += count
        self.generation_tokens.inc(count)
        self.totals.generation_tokens += count
        return count + prompt

    def finish(self, times: RequestTimes, reason: str, now: float) -> None:
        """A sequence has ended."""
        times.finish_reason = reason
        self.success[reason].inc()
        if reason not in ("stop", "length") or times.first_token is None:
            return
        scheduled = times.scheduled if times.scheduled is not None else times.arrival
        last = times.last_token if times.last_token is not None else now
        self.e2e.observe(now - times.arrival)
        self.queue_time.observe(max(0.0, scheduled - times.arrival))
        self.prefill_time.observe(max(0.0, times.first_token - scheduled))
        self.decode_time.observe(last - times.first_token)
        self.inference_time.observe(max(0.0, last - scheduled))
        if times.num_tokens > 1:
            self.per_output_token.observe((last - times.first_token) / (times.num_tokens - 1))
        self.request_prompt.observe(times.num_prompt_tokens)
        self.request_generation.observe(times.num_tokens)
        self.request_max_generation.observe(times.num_tokens)
        self.prefill_computed.observe(times.num_prompt_tokens - times.num_cached_tokens)
        self.num_preemptions_per_request.observe(times.num_preemptions)
        if times.params.max_tokens is not None:
            self.params_max_tokens.observe(times.params.max_tokens)
        if times.is_first_sample:
            self.params_n.observe(times.params.n)

    def count_rejection(self, reason: str) -> None:
        self._rejections.labels(model_name=self._labels["model_name"], reason=reason).inc()

    def _gauge(self, name: str, help: str) -> Gauge:
        return Gauge(f"vllm:{name}", help, _NAMES, registry=self.registry).labels(**self._labels)

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(f"vllm:{name}", help, _NAMES, registry=self.registry).labels(**self._labels)

    def _histogram(
        self, name: str, help: str, buckets: "tuple[float, ...] | list[int]"
    ) -> Histogram:
        return Histogram(
            f"vllm:{name}", help, _NAMES, buckets=buckets, registry=self.registry
        ).labels(**self._labels)
