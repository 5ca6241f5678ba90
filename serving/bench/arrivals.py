"""When the requests of an open loop are sent."""

import math

import numpy as np

from jaxllm.errors import ConfigError


def arrival_times(
    count: int, rate: float, burstiness: float, random: np.random.Generator
) -> np.ndarray:
    """Seconds after the start, ascending, float64 [count]; all 0 for an infinite rate.

    Gaps follow a gamma distribution of shape `burstiness` and mean 1/rate (1 is a Poisson process,
    less comes in bursts, infinity is a clock). They are stretched so that the last request is sent
    at count / rate: the load is then the same for every seed.

    Raises:
      ConfigError: rate or burstiness is not above 0.
    """
    for name, value in (("request rate", rate), ("burstiness", burstiness)):
        if not value > 0:
            raise ConfigError(f"{name} {value}: must be above 0")
    if math.isinf(rate):
        return np.zeros(count)
    if math.isinf(burstiness):
        return np.arange(1, count + 1) / rate
    gaps = random.gamma(burstiness, 1 / (rate * burstiness), count)
    times = np.cumsum(gaps)
    return times * (count / rate / times[-1])
