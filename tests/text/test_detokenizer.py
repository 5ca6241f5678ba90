"""Joined deltas equal the decode of the whole, for every kind of vocabulary."""

import functools
import random

import pytest

from jaxllm.text.detokenizer import IncrementalDetokenizer
from jaxllm.text.tokenizer import Tokenizer

KINDS = ["byte-level", "sentencepiece", "sentencepiece-no-strip", "words", "metaspace", "smollm2"]
TEXTS = [
    "plain words, and more",
    "  leading spaces\n\ttabs",
    "naïve e\u0301 a\u0323\u0302",
    "日本語と한국어 中文",
    "😀👩‍👩‍👧🏳️‍🌈 flags",
]


def deltas(
    tokenizer: Tokenizer, prompt: list[int], output: list[int], rng: random.Random, **options
) -> list[str]:
    stream = IncrementalDetokenizer(tokenizer, prompt, **options)
    parts, at = [], 0
    while at < len(output):
        step = rng.choice([1, 1, 1, 2, 5])
        parts.append(stream.append(output[at : at + step]))
        at += step
    parts.append(stream.finish())
    return parts


@functools.cache
def fragments(tokenizer: Tokenizer) -> list[int]:
    """Ids of the tokens that are one byte, most of which are part of a character."""
    return [i for i in range(tokenizer.vocab_size) if len(tokenizer.token_to_bytes(i)) == 1]


def random_tokens(tokenizer: Tokenizer, rng: random.Random, length: int) -> list[int]:
    """Ids from everywhere: runs of special tokens, fragments of characters, and a hole."""
    short = fragments(tokenizer)
    special = sorted(tokenizer.special_ids)
    ids = []
    for _ in range(length):
        kind = rng.random()
        if kind < 0.45 and short:
            ids.append(rng.choice(short))
        elif kind < 0.55 and special:
            ids.append(rng.choice(special))
        elif kind < 0.57:
            ids.append(tokenizer.vocab_size + 7)
        else:
            ids.append(rng.randrange(tokenizer.vocab_size))
    return ids


@pytest.fixture(params=KINDS)
def tokenizer(request, every_tokenizer) -> Tokenizer:
    if request.param not in every_tokenizer:
        pytest.skip("the packaged model is not installed")
    return every_tokenizer[request.param]


@pytest.mark.parametrize("skip", [True, False])
def test_joined_deltas_equal_the_decode_of_random_tokens(tokenizer, skip):
    rng = random.Random(20)
    for _ in range(1000):
        output = random_tokens(tokenizer, rng, rng.randrange(0, 40))
        spaces = rng.random() < 0.5
        options = {"skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
        got = deltas(tokenizer, [], output, rng, **options)
        assert "".join(got) == tokenizer.decode(output, skip, spaces), output


def expected_after(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool) -> str:
    """The text that follows the prompt, by the definition in words and from whole decodes alone."""
    before = tokenizer.decode(prompt, skip)
    whole = tokenizer.decode(prompt + output, skip)
    if whole.startswith(before):
        return whole[len(before) :]
    # The prompt ends inside a character. Its complete part is what no continuation changes.
    common = 0
    while common < min(len(before), len(whole)) and before[common] == whole[common]:
        common += 1
    return whole[common:]


@pytest.mark.parametrize("skip", [True, False])
def test_deltas_are_the_text_that_follows_the_prompt(tokenizer, skip):
    rng = random.Random(21)
    for _ in range(1000):
        prompt = random_tokens(tokenizer, rng, rng.randrange(0, 12))
        output = random_tokens(tokenizer, rng, rng.randrange(0, 24))
        got = "".join(deltas(tokenizer, prompt, output, rng, skip_special_tokens=skip))
        wanted = expected_after(tokenizer, prompt, output, skip)
        if "\ufffd" in got and got != wanted:
            # An invalid run of byte tokens turns the prompt's own characters into U+FFFD as well;
            # the stream then gives one for each byte of the output only.
            assert tokenizer.name in ("pieces", "no-strip")
            assert wanted.endswith(got)
        else:
            assert got == wanted, (prompt, output)


@pytest.mark.parametrize("text", TEXTS)
def test_every_cut_between_prompt_and_output_gives_the_whole_text(text, every_tokenizer):
    for name in ("byte-level", "sentencepiece", "smollm2"):
        if name not in every_tokenizer:
            continue
        tokenizer = every_tokenizer[name]
        ids = tokenizer.encode(text, add_special_tokens=False)
        whole = tokenizer.decode(ids)
        rng = random.Random(22)
        for cut in range(len(ids)):
            got = "".join(deltas(tokenizer, ids[:cut], ids[cut:], rng))
            assert whole.endswith(got)
            # All that the output adds, and at most the first bytes of a character cut in two.
            added = len(b"".join(map(tokenizer.token_to_bytes, ids[cut:])))
            dropped = cut == 0 and tokenizer.decoding.strip_leading_space
            assert added - dropped <= len(got.encode()) <= added - dropped + 3


def test_a_character_is_released_with_its_last_byte_and_never_in_part(byte_level):
    ids = byte_level.encode("a😀b", add_special_tokens=False)
    stream = IncrementalDetokenizer(byte_level, [])
    assert [stream.append([i]) for i in ids] == ["a", *[""] * (len(ids) - 3), "😀", "b"]
    assert stream.finish() == ""


def test_an_unfinished_character_becomes_a_replacement_at_the_end(byte_level):
    first, *_ = byte_level.encode("😀", add_special_tokens=False)
    stream = IncrementalDetokenizer(byte_level, [])
    assert stream.append([first]) == ""
    assert stream.finish() == "\ufffd"


def test_a_prompt_that_ends_inside_a_character(byte_level):
    ids = byte_level.encode("x😀y", add_special_tokens=False)
    cut = 3
    stream = IncrementalDetokenizer(byte_level, ids[:cut])
    assert stream.append(ids[cut:]) + stream.finish() == "😀y"
    other = IncrementalDetokenizer(byte_level, ids[:cut])
    # The unfinished bytes are shown as U+FFFD in the prompt's own text, and not again.
    assert other.append(byte_level.encode("z", add_special_tokens=False)) == "z"
    assert IncrementalDetokenizer(byte_level, ids[:cut]).finish() == ""


def test_special_tokens_do_not_break_a_character_when_skipped(byte_level, sentencepiece):
    for tokenizer in (byte_level, sentencepiece):
        raw = "😀".encode()
        of_byte = {tokenizer.token_to_bytes(i): i for i in range(tokenizer.vocab_size)}
        ids = [of_byte[bytes([byte])] for byte in raw]
        ids.insert(2, min(tokenizer.special_ids))
        shown = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=False)
        hidden = IncrementalDetokenizer(tokenizer, [])
        assert hidden.append(ids) + hidden.finish() == "😀"
        assert "<s>" in shown.append(ids) + shown.finish()


def test_a_run_of_byte_tokens_is_held_until_it_ends(sentencepiece):
    raw = [sentencepiece.backend.token_to_id(f"<0x{byte:02X}>") for byte in "😀".encode()]
    fox = sentencepiece.backend.token_to_id("fox")
    stream = IncrementalDetokenizer(sentencepiece, [])
    assert [stream.append([i]) for i in [*raw, fox]] == ["", "", "", "", "😀fox"]
    broken = IncrementalDetokenizer(sentencepiece, [])
    assert broken.append([*raw, raw[0], fox]) == "\ufffd" * 5 + "fox"


def test_a_run_of_the_prompt_that_the_output_breaks(sentencepiece):
    """Bytes of the prompt are not shown again; each byte of the output is one U+FFFD."""
    *start, fox = (
        sentencepiece.backend.token_to_id(token) for token in ("<0xC3>", "<0xA9>", "<0xFF>", "fox")
    )
    stream = IncrementalDetokenizer(sentencepiece, start[:2])
    assert stream.append([start[2], start[2], fox]) == "\ufffd\ufffdfox"


def test_the_leading_space_is_dropped_only_at_the_start_of_the_whole_text(sentencepiece):
    the = sentencepiece.backend.token_to_id("▁the")
    assert IncrementalDetokenizer(sentencepiece, []).append([the, the]) == "the the"
    assert IncrementalDetokenizer(sentencepiece, [the]).append([the]) == " the"
    assert IncrementalDetokenizer(sentencepiece, [1]).append([the]) == "the"


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "words", "metaspace"])
def test_cost_per_token_does_not_grow_with_the_length(every_tokenizer, kind, monkeypatch):
    """Counted, not timed: whole decodes are of a few tokens, and tables are asked once a token."""
    tokenizer = every_tokenizer[kind]
    asked: list[int] = []
    decode = Tokenizer.decode

    def counting(self, ids, *args, **options):
        asked.append(len(ids))
        return decode(self, ids, *args, **options)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    prompt = [3 + i % (tokenizer.vocab_size - 3) for i in range(2000)]
    stream = IncrementalDetokenizer(tokenizer, prompt)
    for token_id in prompt:
        stream.append([token_id])
    if kind in ("byte-level", "sentencepiece"):
        assert not asked
    else:
        assert len(asked) < 3 * len(prompt)
        assert max(asked) < 20
