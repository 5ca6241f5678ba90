"""Every form of prompt becomes checked token ids, or an error that names value and limit."""

import numpy as np
import pytest
from tokenizers import processors

from jaxllm.text.errors import PromptError
from jaxllm.text.input import MAX_CACHE_SALT, ProcessedPrompt, process_prompt
from jaxllm.text.tokenizer import Tokenizer
from tests.text.small_tokenizers import sentencepiece_backend

LIMITS = {"max_model_len": 32, "vocab_size": 330}


def process(prompt, tokenizer, **options):
    return process_prompt(prompt, tokenizer, **(LIMITS | options))


def test_every_form_gives_the_same_ids(byte_level):
    ids = byte_level.encode("the fox")
    text = ProcessedPrompt("the fox", ids, None)
    tokens = ProcessedPrompt(None, ids, None)
    assert process("the fox", byte_level) == text
    assert process({"prompt": "the fox"}, byte_level) == text
    assert process({"prompt": "the fox", "prompt_token_ids": None}, byte_level) == text
    assert process(ids, byte_level) == tokens
    assert process(tuple(ids), byte_level) == tokens
    assert process(np.array(ids, np.int32), byte_level) == tokens
    assert process([np.int64(i) for i in ids], byte_level) == tokens
    assert process({"prompt_token_ids": ids}, byte_level) == tokens
    assert process({"prompt_token_ids": ids}, None) == tokens
    assert process({"prompt": "the fox", "cache_salt": "a"}, byte_level).cache_salt == "a"


def test_ids_are_copied(byte_level):
    ids = [5, 6]
    assert process(ids, byte_level).token_ids is not ids


def test_special_tokens_are_added_or_not(sentencepiece):
    bare = Tokenizer(sentencepiece_backend(), name="bare", bos_token_id=1)
    assert process("fox", bare, vocab_size=400).token_ids == bare.encode("fox")
    plain = process("fox", sentencepiece, vocab_size=400, add_special_tokens=False)
    assert plain.token_ids == sentencepiece.encode("fox", add_special_tokens=False)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        ({"prompt": ""}, "empty"),
        ({"prompt_token_ids": []}, "empty"),
        ([5, -1], r"token id -1 at position 1 .* 0 to 329 are allowed"),
        ([330], r"token id 330 at position 0 .* 0 to 329"),
        ([2**70], "token id 1180591620717411303424"),
        ([5, True], "token id True at position 1 is bool"),
        ([1.0], "token id 1.0 at position 0 is float"),
        (["a"], "token id 'a' at position 0 is str"),
        ([[1, 2]], r"token id \[1, 2\] at position 0 is list"),
        (np.array([[1]]), r"array of shape \(1, 1\)"),
        (np.array([1.5]), "dtype float64"),
        (5, "a prompt must be a string, .* not int"),
        (None, "not NoneType"),
        (b"x", "not bytes"),
        ({}, "exactly one of prompt and prompt_token_ids, not 0"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "exactly one .* not 2"),
        ({"prompt": [1]}, "prompt must be a string, not list"),
        ({"prompt_token_ids": "a"}, "prompt_token_ids must be a list of token ids, not str"),
        ({"prompt": "a", "multi_modal_data": {}}, "'multi_modal_data' is not supported"),
        ({"prompt_embeds": [[0.1]]}, "'prompt_embeds' is not supported; allowed: prompt,"),
        ([5] * 32, r"has 32 tokens, but at most 31 .*max_model_len is 32"),
        ([5] * 33, r"has 33 tokens, but at most 31"),
        ("\ud800", "surrogate"),
    ],
)
def test_bad_prompts_are_refused(byte_level, prompt, message):
    with pytest.raises(PromptError, match=message):
        process(prompt, byte_level)


def test_the_longest_allowed_prompt_passes(byte_level):
    assert len(process([5] * 31, byte_level).token_ids) == 31


@pytest.mark.parametrize("salt", ["a", "x" * MAX_CACHE_SALT, "key:1", "日本"])
def test_salts(byte_level, salt):
    assert process({"prompt_token_ids": [1], "cache_salt": salt}, byte_level).cache_salt == salt


@pytest.mark.parametrize(
    ("salt", "message"),
    [
        ("", "has 0 characters; 1 to 128"),
        ("x" * 129, "has 129 characters"),
        ("a@b", "'@'"),
        ("a/b", "'/'"),
        ("a\\b", r"'\\\\'"),
        ("a\0", r"'\\x00'"),
        (5, "must be a string, not int"),
    ],
)
def test_bad_salts_are_refused(byte_level, salt, message):
    with pytest.raises(PromptError, match=message):
        process({"prompt_token_ids": [1], "cache_salt": salt}, byte_level)


def test_truncation_keeps_the_end(byte_level):
    ids = list(range(10, 60))
    assert process(ids, byte_level, truncate_prompt_tokens=4).token_ids == ids[-4:]
    assert process(ids, byte_level, truncate_prompt_tokens=-1).token_ids == ids[-31:]
    text = "one two three four five six seven eight nine ten " * 4
    whole = byte_level.encode(text)
    assert process(text, byte_level, truncate_prompt_tokens=6).token_ids == whole[-6:]
    short = byte_level.encode("one")
    assert process("one", byte_level, truncate_prompt_tokens=20).token_ids == short


def test_truncation_keeps_and_counts_special_tokens():
    backend = sentencepiece_backend()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer = Tokenizer(backend, name="t", bos_token_id=1, eos_token_id=2)
    text = "the fox the fox the fox"
    whole = tokenizer.encode(text)
    cut = process(text, tokenizer, vocab_size=400, truncate_prompt_tokens=5).token_ids
    assert cut == [1, *whole[-4:-1], 2]
    with pytest.raises(PromptError, match="the tokenizer alone adds 2 special tokens"):
        process(text, tokenizer, vocab_size=400, truncate_prompt_tokens=2)


@pytest.mark.parametrize("value", [0, -2, 33, 1.5, True, "3"])
def test_bad_truncation_is_refused(byte_level, value):
    with pytest.raises(PromptError, match=r"truncate_prompt_tokens is .* 1 to 32"):
        process([1], byte_level, truncate_prompt_tokens=value)


def test_text_that_cannot_fit_is_not_tokenised(byte_level, monkeypatch):
    most = LIMITS["max_model_len"] * byte_level.max_token_characters
    monkeypatch.setattr(byte_level, "encode", None)
    with pytest.raises(PromptError, match=f"has {most + 1} characters, more than 32 tokens"):
        process("a" * (most + 1), byte_level)


def test_text_needs_a_tokenizer():
    with pytest.raises(PromptError, match="no tokenizer is loaded"):
        process("a", None)


def test_a_tokenizer_larger_than_the_model_is_noticed(byte_level):
    with pytest.raises(PromptError, match="model's vocabulary has 4"):
        process("abc", byte_level, vocab_size=4)
