"""Sampling noise: one uniform number per token, a pure function of (request seed, position).

It is drawn on the host, from the counter alone, so it does not depend on the batch, on chunking,
on preemption or on the platform. The mixing function is the finaliser of SplitMix64 (Steele, Lea
and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float32 [R] in [0, 1), for seeds uint64 [R] and positions of the tokens to draw, int [R].

    The seed is mixed before the position joins it, so that the streams of seeds s and s + 1 (two
    samples of one prompt) share no number at shifted positions.
    """
    with np.errstate(over="ignore"):
        counter = _mix(seeds + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        bits = _mix(counter)
    return ((bits >> np.uint64(40)).astype(np.float32)) * np.float32(2.0**-24)
