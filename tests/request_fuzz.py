"""Random requests, valid and not, and what every output must obey."""

import json
import math
import random
from typing import Any

import numpy as np

from jaxllm import RequestOutputKind, SamplingParams, StructuredOutputs
from jaxllm.outputs import RequestOutput
from jaxllm.text.bad_words import bad_word_ids
from jaxllm.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"type": "string", "maxLength": 5}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
GRAMMAR = 'start: ("ab" | "c")+ "."'
CHOICES = ("yes", "no", "perhaps")


def random_prompt(rng: random.Random, vocab: int, longest: int) -> dict[str, Any]:
    length = rng.choice([1, 2, rng.randint(1, longest)])
    prompt: dict[str, Any] = {"prompt_token_ids": [rng.randrange(3, vocab) for _ in range(length)]}
    if rng.random() < 0.1:
        prompt["cache_salt"] = rng.choice(["a", "b"])
    return prompt


def random_params(rng: random.Random, vocab: int, most_tokens: int) -> SamplingParams:
    """Any valid parameters; every kind of option, alone and together."""

    def maybe(share: float, value: Any, otherwise: Any) -> Any:
        return value if rng.random() < share else otherwise

    max_tokens = rng.randint(1, most_tokens)
    options: dict[str, Any] = {
        "temperature": rng.choice([0, 0.005, 0.7, 1.0, 2.0]),
        "top_p": rng.choice([1.0, 0.9, 0.5, 1e-6]),
        "top_k": rng.choice([0, -1, 1, 20, 300]),
        "min_p": rng.choice([0.0, 0.05, 1.0]),
        "seed": maybe(0.8, rng.randrange(-(2**63), 2**63), None),
        "max_tokens": max_tokens,
        "presence_penalty": maybe(0.2, rng.uniform(-2, 2), 0.0),
        "frequency_penalty": maybe(0.2, rng.uniform(-2, 2), 0.0),
        "repetition_penalty": maybe(0.2, rng.uniform(0.5, 2), 1.0),
        "logprobs": rng.choice([None, None, 0, 4, True]),
        "prompt_logprobs": maybe(0.1, rng.choice([0, 2]), None),
        "ignore_eos": rng.random() < 0.3,
        "min_tokens": maybe(0.3, rng.randint(0, max_tokens), 0),
        "include_stop_str_in_output": rng.random() < 0.3,
        "skip_special_tokens": rng.random() < 0.7,
        "truncate_prompt_tokens": maybe(0.1, rng.choice([1, 5, -1]), None),
        "output_kind": rng.choice(list(RequestOutputKind)),
        "skip_reading_prefix_cache": rng.random() < 0.1,
    }
    if rng.random() < 0.15:
        options["allowed_token_ids"] = rng.sample(range(vocab), 30)
    if rng.random() < 0.2:
        count = rng.choice([1, 4, 100])
        options["logit_bias"] = {rng.randrange(vocab): rng.uniform(-200, 200) for _ in range(count)}
    if rng.random() < 0.3:
        options["stop_token_ids"] = rng.sample(range(vocab), 10)
    if rng.random() < 0.2:
        options["stop"] = rng.choice(["e", ["the", "a"], ["a b", "o"]])
    if rng.random() < 0.2:
        options["bad_words"] = rng.choice([["e"], ["the", "in"], ["a b"]])
    if rng.random() < 0.15 and options["temperature"]:
        options["n"] = rng.randint(2, 3)
    if rng.random() < 0.2:
        constraint = rng.choice(
            [{"regex": "[a-z ]{1,6}"}, {"choice": CHOICES}, {"json": SCHEMA},
             {"json_object": True}, {"grammar": GRAMMAR}]
        )  # fmt: skip
        options["structured_outputs"] = StructuredOutputs(**constraint)
        # These forbid tokens too: together they may leave none, which is an error of its own.
        for name in ("allowed_token_ids", "bad_words", "stop_token_ids"):
            options.pop(name, None)
    if rng.random() < 0.1 and "stop" not in options:
        options["detokenize"] = False
    return SamplingParams(**options)


def check_output(
    output: RequestOutput,
    params: SamplingParams,
    tokenizer: Tokenizer,
    eos_token_ids: frozenset[int],
    aborted: bool,
) -> None:
    """Raises AssertionError unless the whole, finished output obeys its parameters."""
    assert output.finished
    assert [c.index for c in output.outputs] == list(range(params.n))
    keep = params.truncate_prompt_tokens
    if keep is not None and keep > 0:
        assert len(output.prompt_token_ids) <= keep
    assert 0 <= output.num_cached_tokens < len(output.prompt_token_ids)
    if params.prompt_logprobs is not None and not aborted:
        entries = output.prompt_logprobs
        assert len(entries) == len(output.prompt_token_ids) and entries[0] is None
        for token, entry in zip(output.prompt_token_ids[1:], entries[1:], strict=True):
            _check_entry(entry, token, params.prompt_logprobs)
    for completion in output.outputs:
        _check_completion(completion, params, tokenizer, eos_token_ids, aborted)


def _check_completion(completion, params, tokenizer, eos_token_ids, aborted) -> None:
    ids, reason = completion.token_ids, completion.finish_reason
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else eos_token_ids)
    constraint = params.structured_outputs
    assert reason in ("stop", "length") or (aborted and reason == "abort"), completion
    if reason == "abort":
        assert len(ids) <= params.max_tokens
    else:
        assert 1 <= len(ids) <= params.max_tokens
    if reason == "length":
        assert len(ids) == params.max_tokens
    # An end id ends; before min_tokens there is none, but at the end of a grammar.
    assert not ends & set(ids[:-1])
    if constraint is None:
        assert not ends & set(ids[: params.min_tokens])
        if reason == "stop":
            assert len(ids) > params.min_tokens or params.min_tokens == 0
    if isinstance(completion.stop_reason, int):
        assert ids[-1] == completion.stop_reason and completion.stop_reason in params.stop_token_ids
    elif reason == "stop" and completion.stop_reason is None:
        assert ids[-1] in eos_token_ids
    if params.allowed_token_ids:
        assert set(ids) <= set(params.allowed_token_ids)
    for word in bad_word_ids(tokenizer, params.bad_words):
        assert not any(tuple(ids[i : i + len(word)]) == word for i in range(len(ids)))
    _check_text(completion, params)
    if params.logprobs is None:
        assert completion.logprobs is None and completion.cumulative_logprob is None
        return
    assert len(completion.logprobs) == len(ids)
    for token, entry in zip(ids, completion.logprobs, strict=True):
        _check_entry(entry, token, params.logprobs)
    total = sum(entry[t].logprob for t, entry in zip(ids, completion.logprobs, strict=True))
    assert math.isclose(completion.cumulative_logprob, total, rel_tol=1e-9, abs_tol=1e-9)


def _check_text(completion, params) -> None:
    text, reason = completion.text, completion.finish_reason
    if not params.detokenize:
        assert text == ""
        return
    if isinstance(completion.stop_reason, str):
        assert completion.stop_reason in params.stop
        assert text.endswith(completion.stop_reason) == params.include_stop_str_in_output or (
            not params.include_stop_str_in_output
        )
    if reason == "length" and not params.min_tokens:
        assert not any(stop in text for stop in params.stop), completion
    complete = reason == "stop" and completion.stop_reason is None
    constraint = params.structured_outputs
    if constraint is None or not complete or params.include_stop_str_in_output:
        return
    if constraint.choice:
        assert text in CHOICES
    elif constraint.json or constraint.json_object:
        assert isinstance(json.loads(text), dict)
    elif constraint.grammar:
        assert text.endswith(".") and not text[:-1].replace("ab", "").replace("c", "")
    else:
        assert 1 <= len(text) <= 6 and set(text) <= set("abcdefghijklmnopqrstuvwxyz ")


def _check_entry(entry, token: int, count: int) -> None:
    """One position: the token first, then the most probable ones in falling order."""
    assert next(iter(entry)) == token
    assert max(count, 1) <= len(entry) <= count + 1
    values = [e.logprob for e in entry.values()]
    assert np.isfinite(values).all() and max(values) <= 1e-5
    by_rank = sorted(entry.values(), key=lambda e: e.rank)
    assert [e.logprob for e in by_rank] == sorted(values, reverse=True)
    assert by_rank[0].rank >= 1


# Values that no request may have, by field.
INVALID: dict[str, list[Any]] = {
    "n": [0, -3, 16385, 1.5, "2", True, None],
    "presence_penalty": [2.01, -2.5, math.nan, math.inf, "1", None, True],
    "frequency_penalty": [2.01, -2.5, math.nan, -math.inf, "1", None, []],
    "repetition_penalty": [0, -1, math.nan, math.inf, "1", None],
    "temperature": [-0.1, 2.1, math.nan, math.inf, "hot", None, True],
    "top_p": [0, -0.1, 1.1, math.nan, "1", None],
    "top_k": [-2, 2**31, 1.5, "5", None, True],
    "min_p": [-0.1, 1.1, math.nan, "0", None],
    "seed": [2**63, -(2**63) - 1, 0.5, "7", True],
    "stop": [5, [""], [3], [None], {"a": 1}, b"x"],
    "stop_token_ids": [5, [-1], ["1"], [1.0], [[2]], [10**9], "12"],
    "bad_words": ["word", [""], [1], 7, ["x"] * 129],
    "include_stop_str_in_output": [1, "no", None],
    "ignore_eos": [0, "yes", None],
    "max_tokens": [0, -1, 2**31, 1.5, "16", True],
    "min_tokens": [-1, 10**6, 1.5, None, "2"],
    "logprobs": [-2, 21, 1.5, "3", []],
    "prompt_logprobs": [-2, 21, 0.5, "3"],
    "detokenize": [1, "no", None],
    "skip_special_tokens": [0, None],
    "spaces_between_special_tokens": ["", 2],
    "truncate_prompt_tokens": [0, -2, 10**6, 1.5, "5", True],
    "output_kind": ["DELTA", 1, None],
    "structured_outputs": [{"regex": "a"}, "a", 5],
    "logit_bias": [[1], {-1: 1}, {"5": 1}, {5: math.nan}, {5: "1"}, {10**9: 1.0}, "x",
                   dict.fromkeys(range(1025), 1.0)],
    "allowed_token_ids": [[], 5, [-1], ["3"], [10**9], [{}], "12"],
    "skip_reading_prefix_cache": ["", 1],
    "logprob_token_ids": [[1]],
    "flat_logprobs": [True],
    "stream_interval": [2],
    "repetition_detection": [{}],
    "thinking_token_budget": [0],
    "extra_args": [{"a": 1}],
}  # fmt: skip
# What the fields of a constraint may not be.
INVALID_CONSTRAINTS: list[dict[str, Any]] = [
    {},
    {"regex": "a", "choice": ["b"]},
    {"regex": "("},
    {"regex": 5},
    {"regex": "a" * 70_000},
    {"json": "{"},
    {"json": {"type": "nonsense"}},
    {"json": 7},
    {"choice": []},
    {"choice": "yes"},
    {"choice": [""] * 10_001},
    {"grammar": "start: nowhere"},
    {"grammar": ""},
    {"json_object": False},
    {"json_object": "yes"},
    {"structural_tag": "{}"},
]
