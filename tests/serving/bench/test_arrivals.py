"""Arrival processes."""

import math

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from serving.bench.arrivals import arrival_times


def times(count=20_000, rate=50.0, burstiness=1.0, seed=0):
    return arrival_times(count, rate, burstiness, np.random.default_rng(seed))


def test_all_at_once_without_a_rate():
    assert times(5, math.inf).tolist() == [0.0] * 5


def test_the_last_request_comes_when_the_rate_says():
    for seed in range(3):
        assert times(seed=seed)[-1] == pytest.approx(20_000 / 50)
    assert (times(seed=1) == times(seed=1)).all()
    assert (times(seed=1) != times(seed=2)).any()


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_spread_as_the_gamma_distribution_of_that_shape(burstiness):
    gaps = np.diff(times(burstiness=burstiness))
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.01)
    # Coefficient of variation of a gamma distribution: 1 / sqrt(shape).
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_infinite_burstiness_is_a_clock():
    assert times(4, 2.0, math.inf).tolist() == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize(("rate", "burstiness"), [(0, 1), (-1, 1), (math.nan, 1), (1, 0)])
def test_what_is_no_rate_is_refused(rate, burstiness):
    with pytest.raises(ConfigError):
        times(3, rate, burstiness)
