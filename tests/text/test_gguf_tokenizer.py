"""Tokenizers rebuilt from GGUF metadata."""

import itertools
import json
import random

import gguf
import pytest

from jaxllm.text.errors import TokenizerError
from jaxllm.text.gguf_metadata import read_gguf_metadata
from jaxllm.text.gguf_tokenizer import load_gguf_tokenizer
from jaxllm.text.pre_tokenizers import KNOWN, pre_tokenizer
from jaxllm.text.tokenizer import load_tokenizer
from tests.text.small_tokenizers import CORPUS, byte_level_backend, sentencepiece_vocab

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def write(path, **values):
    """A GGUF file without tensors, with these `tokenizer.` keys (dots written as __)."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        name = "tokenizer." + key.replace("__", ".")
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def gpt2_values():
    """Keys of the byte-level test tokenizer, and that tokenizer."""
    backend = byte_level_backend()
    model = json.loads(backend.to_str())["model"]
    added = backend.get_added_tokens_decoder()
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    types = [
        NORMAL if i not in added else CONTROL if added[i].special else USER_DEFINED
        for i in range(len(tokens))
    ]
    values = {
        "ggml__model": "gpt2",
        "ggml__pre": "gpt-2",
        "ggml__tokens": tokens,
        "ggml__token_type": types,
        "ggml__merges": [" ".join(merge) for merge in model["merges"]],
        "ggml__bos_token_id": 0,
        "ggml__eos_token_id": 1,
    }
    return values, backend


def test_byte_level_equals_the_tokenizer_it_was_written_from(tmp_path):
    values, backend = gpt2_values()
    path = write(tmp_path / "a.gguf", **values, chat_template="{{ x }}")
    tokenizer = load_tokenizer(path, format="gguf")
    for text in [*CORPUS, " a\n\n b  ", "x<s>y</s>", "  two spaces", "日日"]:
        assert tokenizer.encode(text) == backend.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert tokenizer.special_ids == {0, 1, 2}
    assert load_tokenizer(path, format="dummy").encode("x") == tokenizer.encode("x")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.chat_template == tokenizer.tool_chat_template == "{{ x }}"
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_a_template_for_tools_is_kept_apart(tmp_path):
    values, _ = gpt2_values()
    path = write(
        tmp_path / "a.gguf", **values, chat_template="plain", chat_template__tool_use="tools"
    )
    found = load_gguf_tokenizer(path)
    assert (found.chat_template, found.tool_chat_template) == ("plain", "tools")


@pytest.mark.parametrize(
    ("bos", "eos", "ids"), [(True, False, [0, 3]), (False, True, [3, 1]), (True, True, [0, 3, 1])]
)
def test_ends_are_added_as_the_file_says(tmp_path, bos, eos, ids):
    values, _ = gpt2_values()
    path = write(tmp_path / "a.gguf", **values, ggml__add_bos_token=bos, ggml__add_eos_token=eos)
    tokenizer = load_tokenizer(path, format="gguf")
    assert tokenizer.encode("!") == ids
    assert tokenizer.encode("!", add_special_tokens=False) == [3]


def test_llama3_files_add_bos_unless_they_say_otherwise(tmp_path):
    values, _ = gpt2_values()
    path = write(tmp_path / "a.gguf", **values | {"ggml__pre": "llama-bpe"})
    assert load_tokenizer(path, format="gguf").encode("a")[0] == 0
    assert load_tokenizer(path, format="gguf").encode("a", add_special_tokens=False)[0] != 0


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("gpt-2", "it's 1234  x", ["it", "'s", " 1234", " ", " x"]),
        ("smollm", "it's 1234\n\n", ["it", "'s", " ", "1", "2", "3", "4", "\n\n"]),
        (
            "llama-bpe",
            "It'S 12345 (ok)\n\n x",
            ["It", "'S", " ", "123", "45", " (", "ok", ")\n\n", " x"],
        ),
        ("qwen2", "It'S 123\r\n  x", ["It", "'S", " ", "1", "2", "3", "\r\n", " ", " x"]),
        ("tekken", "camelCase/\n1", ["camel", "Case", "/\n", "1"]),
    ],
)
def test_text_is_cut_as_the_pre_tokenizer_says(name, text, pieces):
    unmap = {chr(0x100 + i): chr(b) for i, b in enumerate([*range(0x21), 0x7F])}
    cut = pre_tokenizer(name).build().pre_tokenize_str(text)
    assert ["".join(unmap.get(c, c) for c in piece) for piece, _ in cut] == pieces


def test_composed_and_decomposed_text_are_one_for_qwen2():
    normalizer = pre_tokenizer("qwen2").normalizer()
    assert normalizer.normalize_str("e\u0301") == "\u00e9"
    assert pre_tokenizer("llama-bpe").normalizer() is None


def sentencepiece_values():
    vocab = sentencepiece_vocab()
    words = sorted({word for text in CORPUS[:3] for word in text.split() if word.isalpha()})
    for word in words:
        vocab += [f"▁{word}"[:n] for n in range(1, len(word) + 2)]
        vocab += [word[i : i + n] for n in (2, 3) for i in range(len(word) - n + 1)]
    vocab = list(dict.fromkeys(vocab))
    rng = random.Random(3)
    scores = [0.0 if i < 260 else -rng.random() - len(vocab[i]) / 10 for i in range(len(vocab))]
    types = [BYTE if token.startswith("<0x") else NORMAL for token in vocab]
    types[0] = UNKNOWN
    types[1:4] = [CONTROL] * 3
    return {
        "ggml__model": "llama",
        "ggml__tokens": vocab,
        "ggml__scores": scores,
        "ggml__token_type": types,
    }


def best_pair_first(text, vocab, scores):
    """SentencePiece's BPE in its plainest form: join the pair with the best score, repeatedly."""
    index = {token: i for i, token in enumerate(vocab)}
    parts = list(text)
    while True:
        pairs = [
            (-scores[index[a + b]], at)
            for at, (a, b) in enumerate(itertools.pairwise(parts))
            if a + b in index
        ]
        if not pairs:
            break
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids = []
    for part in parts:
        if part in index:
            ids.append(index[part])
        else:
            ids += [index[f"<0x{byte:02X}>"] for byte in part.encode()]
    return ids


def test_sentencepiece_joins_the_best_pair_first(tmp_path):
    values = sentencepiece_values()
    tokenizer = load_tokenizer(write(tmp_path / "a.gguf", **values), format="gguf")
    vocab, scores = values["ggml__tokens"], values["ggml__scores"]
    rng = random.Random(4)
    words = " ".join(CORPUS).split()
    for _ in range(200):
        text = " ".join(rng.choice(words)[rng.randrange(3) :] for _ in range(5))
        prefixed = "▁" + text.replace(" ", "▁")
        assert tokenizer.encode(text, add_special_tokens=False) == best_pair_first(
            prefixed, vocab, scores
        )
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_defaults(tmp_path):
    values = sentencepiece_values()
    tokenizer = load_tokenizer(write(tmp_path / "a.gguf", **values), format="gguf")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.encode("the")[0] == 1
    assert tokenizer.token_to_bytes(tokenizer.encode("the")[-1]) == b" the"
    assert tokenizer.decode(tokenizer.encode("the 😀 fox")) == "the 😀 fox"


def test_sentencepiece_without_space_prefix(tmp_path):
    values = sentencepiece_values()
    path = write(tmp_path / "a.gguf", **values, ggml__add_space_prefix=False)
    tokenizer = load_tokenizer(path, format="gguf")
    assert tokenizer.decode(tokenizer.encode("the fox")) == "the fox"
    assert tokenizer.decode(tokenizer.encode(" the fox")) == " the fox"
    assert tokenizer.token_to_bytes(tokenizer.encode("the")[1]) == b"the"


BAD = {
    "no vocabulary": ({}, "ggml.model is missing"),
    "model": ({"ggml__model": "rwkv"}, "'rwkv' is not known; known: gpt2, llama"),
    "pre-tokenizer": ({"ggml__pre": "martian"}, "'martian' is not known; known: .*smollm"),
    "no pre-tokenizer": ({"ggml__pre": None}, "ggml.pre is missing"),
    "merge": ({"ggml__merges": ["abc"]}, "merge 'abc'"),
    "merge of strangers": ({"ggml__merges": ["qqq zzz"]}, "do not fit"),
    "twice": ({"ggml__tokens": ["a", "b", "a"]}, "'a' appears as id 0 and id 2"),
    "types": ({"ggml__token_type": [1]}, "has 1 entries"),
    "bos": ({"ggml__bos_token_id": 10**6}, "1000000, outside"),
    "kind": ({"ggml__pre": 3}, "is int, not str"),
    "merges kind": ({"ggml__merges": [1, 2]}, "holds int"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused_by_name(tmp_path, case):
    changes, message = BAD[case]
    values, _ = gpt2_values()
    values = {k: v for k, v in (values | changes).items() if v is not None} if changes else {}
    with pytest.raises(TokenizerError, match=message):
        load_gguf_tokenizer(write(tmp_path / "a.gguf", **values))


def test_metadata_equals_what_was_written(tmp_path):
    values, _ = gpt2_values()
    path = write(tmp_path / "a.gguf", **values)
    found = read_gguf_metadata(path, "tokenizer.")
    assert found == {f"tokenizer.{k.replace('__', '.')}": v for k, v in values.items()}
    assert read_gguf_metadata(path)["general.architecture"] == "llama"


def test_every_truncation_and_corruption_ends_in_an_error_or_a_value(tmp_path):
    values = {"ggml__model": "gpt2", "ggml__tokens": ["a", "b"], "ggml__token_type": [1, 1]}
    whole = write(tmp_path / "a.gguf", **values).read_bytes()
    bad = tmp_path / "bad.gguf"
    end = whole.rindex(b"tokenizer.ggml.token_type") + 50
    for length in range(0, end, 3):
        bad.write_bytes(whole[:length])
        with pytest.raises(TokenizerError, match=r"bad\.gguf"):
            read_gguf_metadata(bad)
    rng = random.Random(6)
    for _ in range(300):
        data = bytearray(whole)
        data[rng.randrange(len(data))] = rng.randrange(256)
        bad.write_bytes(data)
        try:
            read_gguf_metadata(bad)
        except TokenizerError:
            continue


def test_known_names_are_those_of_the_families_served():
    assert {"gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"} <= KNOWN.keys()
