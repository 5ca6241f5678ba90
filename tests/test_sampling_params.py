import math

import pytest

from jaxllm.errors import ParameterError
from jaxllm.sampling_params import SamplingParams

GOOD = [
    {"n": 16384, "temperature": 0.5},
    {"temperature": 2.0},
    {"top_p": 1e-9},
    {"top_k": -1},
    {"min_p": 1.0},
    {"seed": -(2**63)},
    {"max_tokens": None},
    {"stop_token_ids": [0, 5]},
]
BAD = [
    ("n", 0),
    ("n", 16385),
    ("n", True),
    ("n", 1.0),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "1"),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", math.nan),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("seed", 2**63),
    ("seed", 1.0),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", "16"),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [1.5]),
]


@pytest.mark.parametrize("options", GOOD, ids=str)
def test_values_inside_the_limits_are_taken(options):
    SamplingParams(**options)


@pytest.mark.parametrize(("field", "value"), BAD, ids=str)
def test_values_outside_are_refused_by_name_and_value(field, value):
    with pytest.raises(ParameterError, match=f"^{field}=") as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


def test_greedy_switches_the_rest_off():
    params = SamplingParams(temperature=1e-6, top_p=0.5, top_k=5, min_p=0.2)
    assert params.is_greedy and not params.truncates
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    with pytest.raises(ParameterError, match="n=2: must be 1 with greedy"):
        SamplingParams(n=2, temperature=0)


def test_tiny_temperatures_are_raised():
    assert SamplingParams(temperature=1e-4).temperature == 0.01


def test_values_are_brought_to_one_form():
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(stop_token_ids=[3, 1, 3]).stop_token_ids == (3, 1)
