"""Strings and bytes of tokens in logprob entries."""

import random

from jaxllm.text.detokenizer import IncrementalDetokenizer
from jaxllm.text.logprob_text import TokenText, describe_tokens


def sampled(tokenizer, ids):
    return [describe_tokens(tokenizer, [i], ids[:at])[0] for at, i in enumerate(ids)]


def test_strings_join_to_the_text_and_bytes_to_its_bytes(every_tokenizer):
    for name in ("byte-level", "sentencepiece-no-strip", "smollm2"):
        if name not in every_tokenizer:
            continue
        tokenizer = every_tokenizer[name]
        text = "naïve 日本語 👩‍👩‍👧 e\u0301 end"
        ids = tokenizer.encode(text, add_special_tokens=False)
        entries = sampled(tokenizer, ids)
        assert "".join(entry.token for entry in entries) == tokenizer.decode(ids)
        assert b"".join(entry.bytes for entry in entries).decode() == tokenizer.decode(ids)


def test_a_fragment_shows_no_text_and_its_last_byte_shows_the_character(byte_level):
    ids = byte_level.encode("a😀", add_special_tokens=False)
    entries = sampled(byte_level, ids)
    assert [entry.token for entry in entries] == ["a", *[""] * (len(ids) - 2), "😀"]
    assert b"".join(entry.bytes for entry in entries) == "a😀".encode()
    assert entries[1].bytes == "😀".encode()[: len(entries[1].bytes)]


def test_alternatives_are_read_after_the_same_context(byte_level):
    of_bytes = {byte_level.token_to_bytes(i): i for i in range(byte_level.vocab_size)}
    *first, last = (of_bytes[bytes([byte])] for byte in "😀".encode())
    other = of_bytes[b"\x81"]
    a, b, c = describe_tokens(byte_level, [last, other, of_bytes[b"a"]], first)
    assert a == TokenText("😀", b"\x80")
    assert b == TokenText("😁", b"\x81")
    assert c == TokenText("\ufffda", b"a")


def test_strings_agree_with_the_stream_on_random_tokens(byte_level):
    rng = random.Random(5)
    for _ in range(100):
        ids = [rng.randrange(byte_level.vocab_size) for _ in range(20)]
        stream = IncrementalDetokenizer(byte_level, [], skip_special_tokens=False)
        assert [e.token for e in sampled(byte_level, ids)] == [stream.append([i]) for i in ids]


def test_special_tokens_show_their_name(byte_level):
    end = byte_level.eos_token_id
    assert describe_tokens(byte_level, [end], [])[0] == TokenText("</s>", b"</s>")


def test_a_leading_space_is_kept(sentencepiece):
    the = sentencepiece.backend.token_to_id("▁the")
    assert describe_tokens(sentencepiece, [the], [])[0] == TokenText(" the", b" the")


def test_token_id_form(byte_level):
    entry = describe_tokens(byte_level, [7], [], as_token_ids=True)[0]
    assert entry.token == "token_id:7"
    assert entry.bytes == byte_level.token_to_bytes(7)
    assert describe_tokens(None, [9], [])[0] == TokenText("token_id:9", b"")


def test_keys_tell_fragments_apart():
    assert TokenText("", b"\xf0\x9f").key == r"bytes:\xf0\x9f"
    assert TokenText("a", b"a").key == "a"
    assert TokenText("", b"").key == ""
