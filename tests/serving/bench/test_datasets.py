"""Data sets: lengths, reproducibility, files and what is wrong with them."""

import json

import pytest

from serving.bench.arguments import open_tokenizer
from serving.bench.datasets import (
    DatasetError,
    RandomLengths,
    custom_requests,
    random_requests,
    random_word_requests,
    sharegpt_requests,
)


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return open_tokenizer(str(model_folder))


def test_random_text_has_the_lengths_that_were_drawn(tokenizer):
    lengths = RandomLengths(40, 20, range_ratio=0.5)
    requests = random_requests(50, lengths, tokenizer, seed=3)
    for request in requests:
        assert request.prompt_len == len(tokenizer.encode(request.prompt))
        assert 20 <= request.prompt_len <= 60 and 10 <= request.output_len <= 30
    assert len({request.prompt_len for request in requests}) > 10
    assert requests == random_requests(50, lengths, tokenizer, seed=3)
    assert requests != random_requests(50, lengths, tokenizer, seed=4)


def test_random_text_of_a_fixed_length_hits_it(tokenizer):
    requests = random_requests(30, RandomLengths(64, 8), tokenizer, seed=0)
    assert [r.output_len for r in requests] == [8] * 30
    hits = sum(r.prompt_len == 64 for r in requests)
    assert hits >= 27, f"{hits} of 30"


def test_random_prompts_share_a_prefix(tokenizer):
    lengths = RandomLengths(20, 1, prefix_len=40)
    a, b = random_requests(2, lengths, tokenizer, seed=0)
    common = next(i for i, (x, y) in enumerate(zip(a.prompt, b.prompt, strict=False)) if x != y)
    assert common >= 30
    assert a.prompt_len == pytest.approx(60, abs=2)


def test_words_where_there_is_no_tokenizer():
    requests = random_word_requests(3, RandomLengths(10, 4, prefix_len=2), seed=0)
    assert [len(r.prompt.split()) for r in requests] == [12] * 3
    assert len({r.prompt.split()[0] for r in requests}) == 1
    assert len({r.prompt for r in requests}) == 3


@pytest.mark.parametrize(
    "values",
    [{"input_len": 0}, {"output_len": 0}, {"range_ratio": 1.0}, {"range_ratio": -0.1},
     {"prefix_len": -1}],
)  # fmt: skip
def test_impossible_lengths_are_refused(values):
    with pytest.raises(DatasetError, match=next(iter(values))):
        RandomLengths(**values)


def sharegpt(path, entries):
    path.write_text(
        json.dumps([{"conversations": [{"value": text} for text in turns]} for turns in entries])
    )
    return path


def test_sharegpt_takes_question_and_answer_and_leaves_out_what_does_not_fit(tmp_path, tokenizer):
    path = sharegpt(
        tmp_path / "chats.json",
        [
            ["What is it?", "A long answer.", "more"],
            ["only a question"],
            ["Hi", "A long answer."],
            ["What is it now?", "No"],
            ["x" * 1100, "A long answer."],
            ["Say much.", "y" * 2100],
        ],
    )
    requests = sharegpt_requests(
        path, 3, tokenizer, output_len=None, seed=0, shuffle=False, oversample=True
    )
    assert [r.prompt for r in requests] == ["What is it?"] * 3
    assert requests[0].prompt_len == len(tokenizer.encode("What is it?"))
    assert requests[0].output_len == len(tokenizer.encode("A long answer."))
    fixed = sharegpt_requests(path, 2, tokenizer, output_len=5, seed=0, shuffle=False)
    assert [(r.prompt, r.output_len) for r in fixed] == [("What is it?", 5), ("What is it now?", 5)]
    with pytest.raises(DatasetError, match="1 usable"):
        sharegpt_requests(path, 3, tokenizer, output_len=None, seed=0, oversample=False)
    with pytest.raises(DatasetError, match="sharegpt-output-len"):
        sharegpt_requests(path, 1, None, output_len=None, seed=0)


def test_custom_files(tmp_path, tokenizer):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one", "output_tokens": 3}\n\n{"prompt": "two"}\n')
    options = {"seed": 0, "shuffle": False}
    both = custom_requests(path, 3, tokenizer, output_len=9, **options)
    assert [(r.prompt, r.output_len) for r in both] == [("one", 9), ("two", 9), ("one", 9)]
    assert both[0].prompt_len == len(tokenizer.encode("one"))
    with pytest.raises(DatasetError, match="entry 2: output_tokens=None"):
        custom_requests(path, 2, tokenizer, output_len=-1, **options)
    orders = {
        tuple(r.prompt for r in custom_requests(path, 2, None, output_len=1, seed=seed))
        for seed in range(8)
    }
    assert len(orders) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "chats"), ('{"a": 1}\n', "no prompt"), ("", "no usable"), ("[1]", "no prompt")],
)
def test_files_that_are_wrong_are_named(tmp_path, content, message):
    path = tmp_path / "chats.jsonl"
    path.write_text(content)
    with pytest.raises(DatasetError, match=message):
        custom_requests(path, 1, None, output_len=4, seed=0)


def test_a_sharegpt_file_that_is_no_list(tmp_path):
    path = tmp_path / "chats.json"
    path.write_text('{"conversations": []}')
    with pytest.raises(DatasetError, match="not a list"):
        sharegpt_requests(path, 1, None, output_len=4, seed=0)
    with pytest.raises(DatasetError, match=r"nothing\.json"):
        sharegpt_requests(tmp_path / "nothing.json", 1, None, output_len=4, seed=0)
