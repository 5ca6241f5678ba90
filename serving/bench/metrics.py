"""Figures of a load test, under the names and definitions of `vllm bench serve`.

Throughputs are over the whole duration, from before the first request is sent to after the last
answer. TTFT, TPOT and E2EL have one value per answered request (TPOT only where it has two tokens),
ITL one per gap of every request. Deviations are those of the population, percentiles interpolate
linearly.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.errors import ConfigError
from serving.bench.timeline import Timeline

METRICS = ("ttft", "tpot", "itl", "e2el")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


def summarise(
    timelines: Sequence[Timeline],
    duration: float,
    *,
    percentile_metrics: Sequence[str] = METRICS,
    percentiles: Sequence[float] = (99.0,),
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The figures by their names in JSON.

    Args:
      timelines: every request that was sent.
      duration: seconds.
      percentile_metrics: which of METRICS get mean_, median_, std_ and pN_ fields, milliseconds.
      percentiles: the N.
      goodput: most milliseconds of some of GOODPUT_METRICS; answered requests within all of them
        are good.
    """
    done = [t for t in timelines if t.success]
    total_input = sum(t.prompt_len for t in done)
    total_output = sum(t.output_len for t in done)
    peak_tokens, peak_requests = _peaks(done)
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(timelines) - len(done),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(done) / duration,
        "request_goodput": num_good(done, goodput) / duration if goodput else None,
        "output_throughput": total_output / duration,
        "total_token_throughput": (total_input + total_output) / duration,
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_requests,
    }
    values = {
        "ttft": [t.ttft for t in done],
        "tpot": [t.tpot for t in done if t.output_len > 1],
        "itl": [gap for t in done for gap in t.itl],
        "e2el": [t.latency for t in done],
    }
    for name in percentile_metrics:
        milliseconds = 1e3 * np.asarray(values[name] or [0.0])
        figures[f"mean_{name}_ms"] = float(milliseconds.mean())
        figures[f"median_{name}_ms"] = float(np.median(milliseconds))
        figures[f"std_{name}_ms"] = float(milliseconds.std())
        for p in percentiles:
            figures[f"p{p:g}_{name}_ms"] = float(np.percentile(milliseconds, p))
    return figures


def details(timelines: Sequence[Timeline]) -> dict[str, list[Any]]:
    """The fields with one entry per request."""
    return {
        "input_lens": [t.prompt_len for t in timelines],
        "output_lens": [t.output_len if t.success else 0 for t in timelines],
        "ttfts": [t.ttft for t in timelines],
        "itls": [t.itl for t in timelines],
        "latencies": [t.latency for t in timelines],
        "start_times": [t.start for t in timelines],
        "queue_times": [t.queue for t in timelines],
        "generated_texts": [t.text for t in timelines],
        "errors": [t.error for t in timelines],
    }


def num_good(done: Sequence[Timeline], limits: Mapping[str, float]) -> int:
    """Answered requests whose metrics are all within their limits, milliseconds."""

    def value(timeline: Timeline, name: str) -> float:
        return timeline.latency if name == "e2el" else getattr(timeline, name)

    return sum(all(value(t, name) * 1e3 <= most for name, most in limits.items()) for t in done)


def parse_goodput(entries: Sequence[str]) -> dict[str, float]:
    """{"ttft": 200.0} from ["ttft:200"], milliseconds.

    Raises:
      ConfigError: an entry is no such pair.
    """
    limits = {}
    for entry in entries:
        name, _, number = entry.partition(":")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if name not in GOODPUT_METRICS or not value >= 0:
            raise ConfigError(
                f"goodput {entry!r}: NAME:MILLISECONDS with a name of {', '.join(GOODPUT_METRICS)}"
            )
        limits[name] = value
    return limits


def parse_metrics(text: str) -> list[str]:
    """["ttft", "itl"] from "ttft,itl"; ConfigError for other names."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in METRICS:
            raise ConfigError(f"percentile metric {name!r}: one of {', '.join(METRICS)}")
    return names


def parse_percentiles(text: str) -> list[float]:
    """[50.0, 99.0] from "50,99"; ConfigError for what is no percentile."""
    try:
        values = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = [math.nan]
    for value in values:
        if not 0 <= value <= 100:
            raise ConfigError(f"percentiles {text!r}: numbers from 0 to 100, with commas")
    return values


def _peaks(done: Sequence[Timeline]) -> tuple[float, int]:
    """Most pieces of output, and most requests open, in a second counted from the first start."""
    if not done:
        return 0.0, 0
    origin = min(t.start for t in done)
    seconds = int(max(t.start + t.latency for t in done) - origin) + 2
    pieces = np.zeros(seconds)
    open_changes = np.zeros(seconds + 1, np.int64)
    for t in done:
        times = t.start - origin + t.ttft + np.cumsum([0.0, *t.itl])
        np.add.at(pieces, np.minimum(times.astype(int), seconds - 1), 1)
        open_changes[int(t.start - origin)] += 1
        open_changes[int(t.start - origin + t.latency) + 1] -= 1
    return float(pieces.max()), int(np.cumsum(open_changes).max())
