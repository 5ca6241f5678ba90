"""From the engine's news to text: stop strings, ending tokens, merged deltas."""

from jaxllm.sampling_params import SamplingParams
from jaxllm.text.tokenizer import Tokenizer
from serving.engine.messages import LogprobRow, Output
from serving.sequence_stream import Delta, SequenceStream
from tests.text.small_tokenizers import byte_level_backend

TOKENIZER = Tokenizer(byte_level_backend(), name="small")
EOS = frozenset({1})


def feed(text, finish="length", end=None, **params):
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    stream = SequenceStream(TOKENIZER, [5, 6], SamplingParams(max_tokens=99, **params), EOS)
    whole = Delta()
    for place, token in enumerate([*ids, *([end] if end is not None else [])]):
        last = place == len(ids) - (end is None)
        delta = stream.feed(Output("r", [token], finish if last else None))
        whole.merge(delta)
        if delta.finish_reason is not None:
            break
    return whole, stream


def test_text_and_end():
    whole, stream = feed("The quick 日本 fox")
    assert (whole.text, whole.finish_reason) == ("The quick 日本 fox", "length")
    assert stream.num_tokens == len(whole.token_ids)


def test_the_ending_token_is_no_text():
    assert feed("fox", "stop", end=1)[0].text == "fox"
    assert feed("fox", "stop", end=7, stop_token_ids=[7])[0].text == "fox"
    # A grammar that ends the output ends it after a token of the text.
    assert feed("fox", "stop")[0].text == "fox"


def test_stop_strings():
    whole, _ = feed("one two three", stop=["two"])
    assert (whole.text, whole.finish_reason, whole.stop_reason) == ("one ", "stop", "two")
    whole, _ = feed("one two three", stop=["two"], include_stop_str_in_output=True)
    assert whole.text == "one two"
    whole, _ = feed("one tw", stop=["two"])
    assert (whole.text, whole.finish_reason) == ("one tw", "length")
    whole, _ = feed("one one one", stop=["one"], min_tokens=5)
    assert whole.text == "one "[: len(whole.text)] or whole.text.startswith("one")
    assert len(whole.token_ids) > 5


def test_tokens_after_the_stop_string_are_dropped():
    ids = TOKENIZER.encode("ab cd ef", add_special_tokens=False)
    stream = SequenceStream(TOKENIZER, [5], SamplingParams(max_tokens=99, stop=["b"]), EOS)
    rows = [LogprobRow([token], [-1.0], [1]) for token in ids]
    delta = stream.feed(Output("r", ids, None, None, 0, rows))
    assert delta.text == "a"
    assert len(delta.token_ids) == len(delta.logprobs) == 2


def test_without_detokenizing():
    whole, _ = feed("fox", detokenize=False)
    assert whole.text == ""
    assert whole.token_ids


def test_deltas_merge():
    first = Delta("a", [1], [LogprobRow([1], [-1.0], [1])])
    first.merge(Delta("b", [2], [LogprobRow([2], [-2.0], [1])], None, "stop", "x"))
    assert (first.text, first.token_ids, first.finish_reason) == ("ab", [1, 2], "stop")
    assert len(first.logprobs) == 2
