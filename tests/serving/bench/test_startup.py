"""How the time of a start is split by what the server wrote."""

import pytest

from serving.bench.startup_command import PHASES, Startup, split, summarise

LINES = [
    (11.0, "jaxllm: listening at http://127.0.0.1:1 (the model is loading)"),
    (14.0, "INFO jaxllm.sizing: KV pool: 128 blocks of 16 tokens, 2 MiB per device: ..."),
    (18.5, "INFO jaxllm.execution.compilation: 9 programs ready in 3.0 s: 7 compiled, 2 from ..."),
    (19.0, "INFO serving.http.server: ready after 8.0 s: ..."),
]


def test_phases_are_between_the_moments_and_sum_to_the_whole():
    phases, compiled = split(LINES, began=10.0, ready=19.2, done=19.5)
    assert phases == pytest.approx(
        {
            "api_process": 1.0,
            "engine_process": 3.0,
            "weights": 1.5,
            "compilation": 3.0,
            "pool": 0.7,
            "first_token": 0.3,
        }
    )
    assert sum(phases.values()) == pytest.approx(9.5)
    assert compiled == 7


def test_a_phase_without_a_line_is_part_of_the_next():
    phases, _ = split([LINES[0], LINES[3]], began=10.0, ready=19.2, done=19.5)
    assert phases["compilation"] == 0 and phases["pool"] == pytest.approx(8.2)
    assert sum(phases.values()) == pytest.approx(9.5)


def test_rounding_in_a_line_makes_no_negative_phase():
    lines = [(14.0, "KV pool: "), (14.9, "9 programs ready in 1.0 s: 9 compiled, 0 from")]
    phases, _ = split(lines, began=10.0, ready=15.0, done=15.0)
    assert min(phases.values()) >= 0
    assert sum(phases.values()) == pytest.approx(5.0)


def test_the_result_has_vllms_names():
    def start(total):
        return Startup(total, total - 1, dict.fromkeys(PHASES, 1.0), 3)

    result = summarise([start(9.0), start(11.0)], [start(4.0)])
    assert result["avg_cold_startup_time"] == 10.0
    assert result["cold_startup_times"] == [9.0, 11.0]
    assert result["cold_startup_percentiles"]["50"] == 10.0
    assert result["avg_warm_compilation_time"] == 1.0
    assert result["warm_phases"]["weights"] == 1.0
