import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.planning.trace import (
    Lengths,
    TraceError,
    TraceRequest,
    Traffic,
    parse_trace,
    read_trace,
)

GOOD = (
    '{"arrival": 1.5, "prompt_tokens": 20, "output_tokens": 3, "prefix": "a", "prefix_tokens": 8}'
)


def test_lines_become_requests_in_order_of_arrival(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(f'{GOOD}\n\n{{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1}}\n')
    assert read_trace(path) == [TraceRequest(0.0, 1, 1), TraceRequest(1.5, 20, 3, "a", 8)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "not an object"),
        ('{"arrival": 0, "prompt_tokens": 4}', "no 'output_tokens'"),
        (GOOD.replace("arrival", "arivall"), "unknown field 'arivall'"),
        (GOOD.replace("1.5", '"soon"'), "arrival='soon'"),
        (GOOD.replace("1.5", "-1"), "arrival=-1.0"),
        (GOOD.replace("1.5", "NaN"), "arrival=nan"),
        (GOOD.replace("20", "0"), "prompt_tokens=0"),
        (GOOD.replace("20", "2.5"), "prompt_tokens=2.5"),
        (GOOD.replace("20", "true"), "prompt_tokens=True"),
        (GOOD.replace("8}", "21}"), "prefix_tokens=21"),
        (GOOD.replace('"a"', "7"), "prefix=7"),
        (GOOD.replace('"a"', "null"), "there is no prefix"),
    ],
)
def test_a_wrong_line_is_named(line, message):
    with pytest.raises(TraceError, match="line 2") as error:
        parse_trace([GOOD, line])
    assert message in str(error.value)
    assert isinstance(error.value, ConfigError)


def test_an_empty_trace_is_refused():
    with pytest.raises(TraceError, match="no requests"):
        parse_trace(["", "  "])


def test_traffic_has_its_rate_and_lengths():
    traffic = Traffic(20_000, 50.0, Lengths.parse("64:255"), Lengths.parse("300~0.8"))
    found = list(traffic.requests())
    assert found == list(traffic.requests())
    arrivals = np.array([r.arrival for r in found])
    assert (np.diff(arrivals) >= 0).all()
    assert len(found) / arrivals[-1] == pytest.approx(50, rel=0.03)
    prompts = np.array([r.prompt_tokens for r in found])
    assert prompts.min() == 64 and prompts.max() == 255
    outputs = np.array([r.output_tokens for r in found])
    assert outputs.mean() == pytest.approx(300, rel=0.03)
    assert np.log(outputs).std() == pytest.approx(0.8, rel=0.03)


def test_bursts_spread_the_gaps():
    def variation(burstiness):
        traffic = Traffic(
            20_000, 10.0, Lengths.parse("8"), Lengths.parse("8"), burstiness=burstiness
        )
        gaps = np.diff([r.arrival for r in traffic.requests()])
        return gaps.std() / gaps.mean()

    assert variation(1.0) == pytest.approx(1.0, rel=0.05)
    assert variation(0.25) == pytest.approx(2.0, rel=0.1)


def test_prefixes_come_before_the_drawn_prompt():
    traffic = Traffic(
        100, 0.0, Lengths.parse("10"), Lengths.parse("1"), prefix_groups=4, prefix_tokens=32
    )
    found = list(traffic.requests())
    assert {r.prefix for r in found} == {f"prefix {i}" for i in range(4)}
    assert {(r.prompt_tokens, r.prefix_tokens, r.arrival) for r in found} == {(42, 32, 0.0)}


@pytest.mark.parametrize("text", ["", "0", "-3", "5:2", "0:4", "a:b", "100~0", "100~x", "1.5"])
def test_wrong_lengths_are_refused(text):
    with pytest.raises(TraceError, match="length"):
        Lengths.parse(text)


def test_wrong_traffic_is_refused():
    one = Lengths.parse("1")
    with pytest.raises(TraceError, match="rate"):
        Traffic(1, float("nan"), one, one)
    with pytest.raises(TraceError, match="num_requests"):
        Traffic(0, 1.0, one, one)
    with pytest.raises(TraceError, match="burstiness"):
        Traffic(1, 1.0, one, one, burstiness=0)
