"""Which of the known troubles a server has, told from its metrics, with the numbers.

Works on what `/metrics` says at two times, so it needs nothing but the page.
"""

import dataclasses
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping

from prometheus_client.parser import text_string_to_metric_families

from serving.errors import ServingError

_HIGH_USAGE = 0.9
_LOW_USAGE = 0.7
_PREEMPTIONS_PER_REQUEST = 0.1
_LOW_HIT_RATE = 0.1
_MIN_QUERIES = 1000
_SPIKE = 5.0
_MIN_GAPS = 50
_MAX_PAGE = 8 * 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """A trouble.

    Attributes:
      name: which one.
      evidence: the numbers that show it.
      advice: what to change.
    """

    name: str
    evidence: str
    advice: str


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """The metrics of a server at one time.

    Attributes:
      values: series name without labels -> sum over all label values.
      buckets: histogram -> upper bound -> cumulative count.
      settings: labels of `cache_config_info`.
    """

    values: Mapping[str, float]
    buckets: Mapping[str, Mapping[float, float]]
    settings: Mapping[str, str]

    def get(self, name: str) -> float:
        return self.values.get(f"vllm:{name}", 0.0)


def parse(page: str) -> Sample:
    """A Sample of the text of `/metrics`; ServingError if it is none."""
    values: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    settings: dict[str, str] = {}
    try:
        for family in text_string_to_metric_families(page):
            for series in family.samples:
                if series.name == "vllm:cache_config_info":
                    settings = dict(series.labels)
                elif series.name.endswith("_bucket"):
                    counts = buckets.setdefault(series.name.removesuffix("_bucket"), {})
                    bound = float(series.labels["le"])
                    counts[bound] = counts.get(bound, 0.0) + series.value
                else:
                    values[series.name] = values.get(series.name, 0.0) + series.value
    except ValueError as error:
        raise ServingError(f"that is no page of Prometheus metrics: {error}") from None
    return Sample(values, buckets, settings)


def fetch(url: str, timeout: float = 10.0) -> Sample:
    """A Sample of a running server; ServingError if it does not answer."""
    address = url.rstrip("/").removesuffix("/v1") + "/metrics"
    if not address.startswith(("http://", "https://")):
        raise ServingError(f"{url!r}: must begin with http:// or https://")
    try:
        with urllib.request.urlopen(address, timeout=timeout) as reply:
            return parse(reply.read(_MAX_PAGE).decode("utf-8", "replace"))
    except (urllib.error.URLError, TimeoutError, OSError) as error:
        raise ServingError(f"{address}: {error}") from None


class Diagnosis:
    """What two samples say.

    Args:
      queue_target: seconds that a request may wait on average.
    """

    def __init__(self, before: Sample, after: Sample, queue_target: float = 1.0):
        self._before = before
        self._after = after
        self._queue_target = queue_target

    def findings(self) -> list[Finding]:
        """Every trouble that shows, the worst kinds first."""
        checks: tuple[Callable[[], Finding | None], ...] = (
            self._recompiles,
            self._preemptions,
            self._memory,
            self._places,
            self._queue,
            self._spikes,
            self._prefix,
        )
        return [finding for check in checks if (finding := check()) is not None]

    def _rise(self, name: str) -> float:
        return self._after.get(name) - self._before.get(name)

    def _recompiles(self) -> Finding | None:
        name = "jaxllm:recompilations_total"
        count = self._after.values.get(name, 0.0) - self._before.values.get(name, 0.0)
        if count <= 0:
            return None
        return Finding(
            "recompiles",
            f"{count:.0f} programs were compiled while requests ran",
            "do not start with --enforce-eager: warm-up then compiles every bucket before",
        )

    def _preemptions(self) -> Finding | None:
        count = self._rise("num_preemptions_total")
        finished = max(1.0, self._rise("request_success_total"))
        if count < 2 or count / finished < _PREEMPTIONS_PER_REQUEST:
            return None
        return Finding(
            "preemption storm",
            f"{count:.0f} preemptions for {finished:.0f} finished requests, "
            f"KV use {self._after.get('kv_cache_usage_perc'):.0%}",
            "work is done twice: lower --max-num-seqs, or give the KV cache more memory "
            "(--kv-cache-memory, --gpu-memory-utilization)",
        )

    def _memory(self) -> Finding | None:
        usage = self._after.get("kv_cache_usage_perc")
        waiting = self._after.get("num_requests_waiting")
        if usage < _HIGH_USAGE or waiting == 0:
            return None
        return Finding(
            "KV memory is the limit",
            f"KV use {usage:.0%}, {waiting:.0f} waiting, "
            f"{self._after.get('num_requests_running'):.0f} running",
            "give the KV cache more memory (--kv-cache-memory, --gpu-memory-utilization), "
            "a narrower --kv-cache-dtype, or add replicas",
        )

    def _places(self) -> Finding | None:
        usage = self._after.get("kv_cache_usage_perc")
        waiting = self._after.get("num_requests_waiting")
        running = self._after.get("num_requests_running")
        places = float(self._after.settings.get("max_num_seqs", "0") or 0)
        if waiting == 0 or usage > _LOW_USAGE or not places or running < places:
            return None
        return Finding(
            "max_num_seqs is the limit",
            f"{running:.0f} of {places:.0f} places taken, {waiting:.0f} waiting, "
            f"KV use only {usage:.0%}",
            f"raise --max-num-seqs above {places:.0f}",
        )

    def _queue(self) -> Finding | None:
        count = self._rise("request_queue_time_seconds_count")
        if count == 0:
            return None
        mean = self._rise("request_queue_time_seconds_sum") / count
        if mean <= self._queue_target:
            return None
        return Finding(
            "queue time over its target",
            f"{mean:.2f} s on average over {count:.0f} requests, target {self._queue_target:g} s",
            "add replicas, or refuse early with --max-queue-time or --max-num-queued-reqs",
        )

    def _spikes(self) -> Finding | None:
        name = "vllm:inter_token_latency_seconds"
        before, after = self._before.buckets.get(name, {}), self._after.buckets.get(name, {})
        counts = {bound: count - before.get(bound, 0.0) for bound, count in after.items()}
        total = max(counts.values(), default=0.0)
        if total < _MIN_GAPS:
            return None
        median, high = _quantile(counts, 0.5), _quantile(counts, 0.99)
        if high < _SPIKE * median:
            return None
        budget = self._after.settings.get("max_num_batched_tokens", "?")
        return Finding(
            "latency spikes from prefill",
            f"1 % of the gaps between tokens are above {high:g} s, half are below {median:g} s; "
            f"a step may hold {budget} tokens",
            "lower --max-num-batched-tokens, or set --long-prefill-token-threshold",
        )

    def _prefix(self) -> Finding | None:
        queries = self._rise("prefix_cache_queries_total")
        prompts = self._rise("prompt_tokens_total")
        if self._after.settings.get("enable_prefix_caching") == "False":
            if prompts < _MIN_QUERIES:
                return None
            return Finding(
                "no prefix cache",
                f"{prompts:.0f} prompt tokens, prefix caching is off",
                "start with --enable-prefix-caching",
            )
        if queries < _MIN_QUERIES:
            return None
        rate = self._rise("prefix_cache_hits_total") / queries
        if rate >= _LOW_HIT_RATE:
            return None
        requests = max(1.0, self._rise("request_prompt_tokens_count"))
        mean, block = prompts / requests, float(self._after.settings.get("block_size", "16") or 16)
        if mean < 2 * block:
            why = f"prompts have {mean:.0f} tokens on average and blocks {block:.0f}"
            advice = "a smaller --block-size shares shorter prefixes"
        else:
            why = "prompts differ from their first block on"
            advice = (
                "put what is common first (system message, tools); what changes, such as a date, "
                "last; requests with other cache salts or API keys share nothing"
            )
        return Finding("low prefix hit rate", f"{rate:.1%} of {queries:.0f} tokens: {why}", advice)


def _quantile(counts: Mapping[float, float], share: float) -> float:
    """Upper bound of the bucket in which a quantile lies."""
    total = max(counts.values())
    return next(bound for bound, count in sorted(counts.items()) if count >= share * total)
