"""What a request leaves out comes from the model, then from the general defaults."""

import msgspec
import pytest

from jaxllm.errors import ParameterError
from serving.http.params import make_params
from serving.http.protocol import ChatRequest
from tests.serving.descriptions import description

MODEL = {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "max_new_tokens": 64, "pad_token_id": 3}


def params(given, generation_config=MODEL, prompt_len=10, max_tokens=None, **config):
    engine = msgspec.structs.replace(description(config), generation_config=generation_config)
    request = msgspec.convert({**given, "messages": []}, ChatRequest)
    return make_params(request, engine, prompt_len=prompt_len, max_tokens=max_tokens)


def test_the_models_defaults_stand_below_the_requests_values():
    found = params({"top_p": 0.5, "top_k": 0})
    assert (found.temperature, found.top_p, found.top_k) == (0.6, 0.5, 0)


def test_a_model_that_does_not_sample_is_greedy():
    assert params({}, {"do_sample": False, "temperature": 0.9}).temperature == 0.0
    assert params({"temperature": 1.5}, {"do_sample": False}).temperature == 1.5


@pytest.mark.parametrize(
    ("generation_config", "prompt_len", "asked", "expected"),
    [
        ({}, 10, None, 90),
        (MODEL, 10, None, 64),
        (MODEL, 70, None, 30),
        (MODEL, 10, 80, 80),
        (MODEL, 70, 80, 30),
    ],
)
def test_the_most_tokens_of_an_answer(generation_config, prompt_len, asked, expected):
    found = params({}, generation_config, prompt_len, asked)
    assert found.max_tokens == expected


def test_the_whole_vocabulary_is_for_engines_that_allow_it():
    asked = {"prompt_logprobs": -1}
    with pytest.raises(ParameterError, match=r"prompt_logprobs=-1: .*at most 5 "):
        params(asked, max_logprobs=5)
    for limit in (-1, 10):
        assert params(asked, max_logprobs=limit).prompt_logprobs == -1
