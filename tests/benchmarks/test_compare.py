"""The parts of the comparison that need no engine."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import simulator
from benchmarks.compare.engine_process import EngineFailedError
from benchmarks.compare.serving import compare_rows
from benchmarks.compare.summary import common_share, markdown, summarise
from benchmarks.compare.workloads import SETUPS, WORKLOADS, common_prefix, digest
from jaxllm.planning.step_time import StepSample, write_samples
from jaxllm.planning.trace import TraceRequest, read_trace

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("name", WORKLOADS)
def test_prompts_are_as_described_and_new_in_each_round(name: str) -> None:
    workload = WORKLOADS[name]
    first, again, other = workload.prompts(), workload.prompts(0), workload.prompts(1)
    assert first == again
    assert len(first) == workload.requests
    low, high = workload.prompt_tokens
    assert all(low <= len(ids) <= high for ids in first)
    assert [len(ids) for ids in first] == [len(ids) for ids in other]
    assert digest(first) != digest(other)
    setup = SETUPS[workload.setup]
    assert high + workload.new_tokens <= setup.max_model_len


def test_a_shared_prefix_is_shared_within_a_round_only() -> None:
    workload = WORKLOADS["prefix"]
    first, other = workload.prompts(0), workload.prompts(1)
    shared = first[0][: workload.prefix_tokens]
    assert all(ids[: workload.prefix_tokens] == shared for ids in first)
    assert len({tuple(ids) for ids in first}) == workload.requests
    assert other[0][: workload.prefix_tokens] != shared


def test_a_common_prefix_leaves_every_prompt_a_token() -> None:
    assert common_prefix([[1, 2, 3, 4], [1, 2, 9], [1, 2, 3, 5]]) == 2
    assert common_prefix([[1, 2, 3], [1, 2, 3]]) == 2
    assert common_prefix([[1, 2], [1, 2, 3]]) == 1
    assert common_prefix([[1], [2]]) == 0
    prompts = WORKLOADS["prefix"].prompts()
    assert common_prefix(prompts) == WORKLOADS["prefix"].prefix_tokens


def test_agreement_counts_tokens_before_the_first_difference() -> None:
    assert common_share([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]) == pytest.approx(4 / 6)
    assert common_share([[1, 2]], [[1, 2]]) == 1.0


def _run(engine: str, speed: float, round_number: int, prompts: str = "p") -> dict[str, Any]:
    return {
        "engine": engine,
        "workload": "throughput",
        "round": round_number,
        "prompts_digest": f"{prompts}{round_number}",
        "tok_per_s": speed,
        "dtype": "bfloat16",
        "startup_s": 1.0,
        "threads": 2,
        "versions": {engine: "1.0"},
        "outputs": [[1, 2]],
    }


def test_rows_have_medians_spread_and_ratios() -> None:
    runs = [_run("ours", s, i) for i, s in enumerate((12.0, 10.0, 20.0))]
    runs += [_run("theirs", s, i) for i, s in enumerate((5.0, 6.0, 4.0))]
    ours, theirs = summarise(runs, "theirs")
    assert (ours["median"], ours["least"], ours["most"]) == (12.0, 10.0, 20.0)
    assert ours["ratio"] == pytest.approx(12 / 5)
    assert theirs["ratio"] == 1.0
    assert ours["agreement"] == 1.0
    assert "| throughput | ours | bfloat16 | 3 | 12.0 (10.0 to 20.0) | 2.40 |" in markdown(
        [ours, theirs], "theirs"
    )


def test_engines_that_were_given_different_prompts_are_not_compared() -> None:
    runs = [_run("ours", 1.0, 0), _run("theirs", 1.0, 0, prompts="q")]
    with pytest.raises(EngineFailedError, match="different prompts"):
        summarise(runs, "theirs")


def test_servers_are_compared_per_concurrency() -> None:
    figures = {"median_ttft_ms": 1.0, "median_itl_ms": 2.0, "p99_itl_ms": 3.0}
    runs = [
        {"server": name, "concurrency": 8, "output_throughput": speed, **figures}
        for name, speed in (("ours", 30.0), ("theirs", 10.0), ("ours", 20.0))
    ]
    rows = compare_rows({"ours": [9.0, 3.0], "theirs": [90.0, 30.0]}, runs, "theirs")
    by_name = {(row["measure"], row["server"]): row for row in rows}
    assert by_name["start-up warm, s", "ours"]["ratio"] == pytest.approx(0.1)
    throughput = by_name["output_throughput, concurrency 8", "ours"]
    assert (throughput["value"], throughput["ratio"]) == (25.0, 2.5)


def test_the_simulator_is_asked_with_the_engine_s_limits(tmp_path: Path) -> None:
    trace = [TraceRequest(0.0, 40, 8), TraceRequest(0.5, 30, 4)]
    simulator.write_trace(tmp_path / "trace.jsonl", trace)
    assert read_trace(tmp_path / "trace.jsonl") == trace
    samples = [StepSample(40 * i, i, 50 * i, 0.01 * (1 + i)) for i in range(12)]
    write_samples(tmp_path / "steps.json", samples)
    result = simulator.simulated(
        str(ROOT / "tests/golden/data/tiny_chat"), tmp_path / "trace.jsonl", tmp_path / "steps.json"
    )
    assert result["num_finished"] == 2
    assert result["output_tokens_per_second"] > 0
