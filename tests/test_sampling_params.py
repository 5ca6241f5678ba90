import math

import pytest

from jaxllm.errors import ParameterError
from jaxllm.sampling_params import SamplingParams, check_against_model

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
    ("stop_token_ids", 5),
    ("stop_token_ids", [[5]]),
    ("stop", 5),
    ("bad_words", "word"),
    ("allowed_token_ids", "12"),
    ("allowed_token_ids", [{}]),
    ("ignore_eos", "yes"),
    ("detokenize", 1),
    ("stop_token_ids", [1.5]),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", math.inf),
    ("stop", [""]),
    ("stop", [3]),
    ("bad_words", [""]),
    ("bad_words", ["x"] * 129),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("logprobs", -2),
    ("logprobs", 1.5),
    ("prompt_logprobs", "3"),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"5": 1.0}),
    ("logit_bias", {5: math.nan}),
    ("logit_bias", [1]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-5]),
    ("structured_outputs", {"regex": "a"}),
    ("output_kind", "DELTA"),
    ("flat_logprobs", True),
    ("thinking_token_budget", 5),
]


@pytest.mark.parametrize("options", GOOD, ids=str)
def test_values_inside_the_limits_are_taken(options):
    SamplingParams(**options)


@pytest.mark.parametrize(("field", "value"), BAD, ids=str)
def test_values_outside_are_refused_by_name_and_value(field, value):
    with pytest.raises(ParameterError, match=f"^{field}=") as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


def test_stop_needs_text():
    with pytest.raises(ParameterError, match=r"stop=.*needs detokenize=True"):
        SamplingParams(stop="x", detokenize=False)


def test_words_and_biases_are_brought_to_one_form():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(logprobs=True).logprobs == 1
    assert SamplingParams(logprobs=False).logprobs is None
    assert SamplingParams(logit_bias={3: 1000, 4: -1000}).logit_bias == {3: 100.0, 4: -100.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"allowed_token_ids": [100]},
            "allowed_token_ids=100: must be below the vocabulary of 100",
        ),
        ({"logit_bias": {100: 1.0}}, "logit_bias=100"),
        ({"stop_token_ids": [100]}, "stop_token_ids=100"),
        ({"logprobs": 21}, r"logprobs=21: at most 20 \(max_logprobs\)"),
        ({"prompt_logprobs": 21}, "prompt_logprobs=21"),
        ({"logprobs": -1}, r"logprobs=-1: stands for 100 tokens; at most 20 \(max_logprobs\)"),
        ({"prompt_logprobs": -1}, "prompt_logprobs=-1: stands for 100 tokens"),
        ({"min_tokens": 9, "max_tokens": None}, "min_tokens=9: the prompt leaves room for 8"),
    ],
    ids=str,
)
def test_what_only_the_engine_can_judge(options, message):
    with pytest.raises(ParameterError, match=message):
        check_against_model(SamplingParams(**options), 100, 20, 8)
    check_against_model(SamplingParams(logprobs=20, prompt_logprobs=20), 100, 20, 8)


@pytest.mark.parametrize(
    ("max_logprobs", "allowed", "refused"),
    [(-1, [-1, 25, 101], []), (100, [-1, 100], [101]), (99, [99], [-1, 100])],
)
@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_the_whole_vocabulary_where_it_is_allowed(max_logprobs, allowed, refused, field):
    for count in allowed:
        check_against_model(SamplingParams(**{field: count}), 100, max_logprobs, 8)
    for count in refused:
        with pytest.raises(ParameterError, match=f"{field}={count}: .*at most {max_logprobs}"):
            check_against_model(SamplingParams(**{field: count}), 100, max_logprobs, 8)


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
