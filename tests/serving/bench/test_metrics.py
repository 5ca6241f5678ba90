"""Each figure by its definition, on timelines made by hand."""

import math

import pytest

from jaxllm.errors import ConfigError
from serving.bench.metrics import (
    details,
    parse_goodput,
    parse_metrics,
    parse_percentiles,
    summarise,
)
from serving.bench.timeline import Timeline


def timeline(start, moments, prompt_len=10, output_len=None, queue=0.0):
    """A request whose pieces of output came at `moments`."""
    made = Timeline(start=start, prompt_len=prompt_len, queue=queue, error="")
    for moment in moments:
        made.note(moment)
    made.output_len = len(moments) if output_len is None else output_len
    return made


ONE = timeline(100.0, [100.5, 100.6, 100.9], prompt_len=7)
TWO = timeline(100.2, [101.2, 101.4], prompt_len=3)
LOST = Timeline(start=100.0, prompt_len=50, ttft=9.0, latency=9.0, output_len=1, error="503")


def test_a_timeline_of_pieces():
    assert ONE.ttft == pytest.approx(0.5)
    assert ONE.itl == pytest.approx([0.1, 0.3])
    assert ONE.latency == pytest.approx(0.9)
    # (0.9 - 0.5) / 2 tokens after the first.
    assert ONE.tpot == pytest.approx(0.2)
    assert timeline(0.0, [2.0]).tpot == 0.0


def test_tokens_of_one_piece_count_in_tpot_and_not_in_itl():
    merged = timeline(0.0, [1.0, 3.0], output_len=5)
    assert merged.itl == [2.0]
    assert merged.tpot == pytest.approx(0.5)


def test_counts_and_rates():
    figures = summarise([ONE, TWO, LOST], duration=2.0)
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (10, 5)
    assert figures["request_throughput"] == 1.0
    assert figures["output_throughput"] == 2.5
    assert figures["total_token_throughput"] == 7.5
    assert figures["request_goodput"] is None


def test_times_are_in_milliseconds_over_the_answered_requests():
    figures = summarise([ONE, TWO, LOST], duration=2.0, percentiles=(50.0, 99.9))
    assert figures["mean_ttft_ms"] == pytest.approx(750)
    assert figures["median_ttft_ms"] == pytest.approx(750)
    assert figures["std_ttft_ms"] == pytest.approx(250)
    # Percentiles interpolate: 99.9 % of the way from 500 to 1000.
    assert figures["p99.9_ttft_ms"] == pytest.approx(999.5)
    # One value per gap, not per request.
    assert figures["mean_itl_ms"] == pytest.approx((100 + 300 + 200) / 3)
    assert figures["p50_itl_ms"] == pytest.approx(200)
    assert figures["mean_tpot_ms"] == pytest.approx((200 + 200) / 2)
    assert figures["mean_e2el_ms"] == pytest.approx((900 + 1200) / 2)


def test_a_request_of_one_token_has_no_time_per_further_token():
    figures = summarise([ONE, timeline(0.0, [5.0])], duration=1.0)
    assert figures["mean_tpot_ms"] == pytest.approx(200)


def test_only_the_metrics_that_are_asked_for():
    figures = summarise([ONE], 1.0, percentile_metrics=("ttft",))
    assert "mean_ttft_ms" in figures and "mean_itl_ms" not in figures


def test_goodput_counts_requests_within_every_limit():
    def good(**limits):
        return summarise([ONE, TWO, LOST], 2.0, goodput=limits)["request_goodput"]

    assert good(ttft=500) == 0.5
    assert good(ttft=1000.1) == 1.0
    assert good(ttft=1000.1, e2el=1000) == 0.5
    assert good(tpot=100) == 0.0
    # A request of one token has met any limit per further token.
    assert summarise([timeline(0.0, [1.0])], 1.0, goodput={"tpot": 1})["request_goodput"] == 1.0


def test_peaks_are_of_seconds_from_the_first_start():
    a = timeline(10.0, [10.1, 10.2, 10.3, 11.5])
    b = timeline(10.5, [10.9, 11.1])
    c = timeline(12.9, [13.0])
    figures = summarise([a, b, c], 4.0)
    # Second 0: three of a and one of b. Seconds 0 and 1 see a and b; second 2 and 3 see c.
    assert figures["max_output_tokens_per_s"] == 4
    assert figures["max_concurrent_requests"] == 2


def test_nothing_answered():
    figures = summarise([LOST], duration=2.0)
    assert figures["completed"] == 0 and figures["output_throughput"] == 0
    assert figures["mean_ttft_ms"] == 0 and figures["max_concurrent_requests"] == 0


def test_details_have_an_entry_per_request():
    fields = details([ONE, LOST])
    assert fields["output_lens"] == [3, 0]
    assert fields["errors"] == ["", "503"]
    assert fields["itls"][0] == pytest.approx([0.1, 0.3])
    assert {len(values) for values in fields.values()} == {2}


def test_flags_are_read_or_refused():
    assert parse_goodput(["ttft:200", "e2el:1e3"]) == {"ttft": 200.0, "e2el": 1000.0}
    assert parse_metrics("ttft, itl") == ["ttft", "itl"]
    assert parse_percentiles("50,99.9") == [50.0, 99.9]
    for parse, value in (
        (parse_goodput, ["itl:3"]),
        (parse_goodput, ["ttft"]),
        (parse_goodput, ["ttft:-1"]),
        (parse_goodput, [f"ttft:{math.nan}"]),
        (parse_metrics, "ttft,speed"),
        (parse_percentiles, "50,101"),
        (parse_percentiles, "fifty"),
    ):
        with pytest.raises(ConfigError):
            parse(value)
