"""The tokenizer wrapper: Hugging Face folders, the packaged model, bytes of tokens, threads."""

import json
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub
import pytest
from transformers import LlamaTokenizer, PreTrainedTokenizerFast

from jaxllm.checkpoints import hub
from jaxllm.checkpoints.resolve import PACKAGED, resolve
from jaxllm.text.chat_template import encode_chat, render_conversation
from jaxllm.text.errors import PromptError, TokenizerError, UnencodableTextError
from jaxllm.text.token_bytes import Decoding, Joining, decoding_of
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer, tokenizer_format
from tests.checkpoints.gguf_files import write_gguf
from tests.text.small_tokenizers import (
    CORPUS,
    byte_level_backend,
    sentencepiece_backend,
    sentencepiece_vocab,
    smollm2_path,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "data" / "smollm2_tokenizer.json"


def save_folder(path, backend, **settings):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", **settings
    )
    tokenizer.save_pretrained(path)
    return tokenizer


@pytest.fixture
def offline(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("backend", [byte_level_backend, sentencepiece_backend])
def test_a_folder_gives_what_transformers_gives(tmp_path, backend, offline):
    peer = save_folder(tmp_path, backend(), chat_template="{{ messages }}", pad_token="<|tool|>")
    tokenizer = load_tokenizer(tmp_path, format="safetensors")
    for text in CORPUS:
        ids = tokenizer.encode(text)
        assert ids == peer.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == peer.encode(
            text, add_special_tokens=False
        )
        assert tokenizer.decode(ids) == peer.decode(ids, skip_special_tokens=True)
    assert tokenizer.encode_batch(CORPUS) == [peer.encode(text) for text in CORPUS]
    assert tokenizer.vocab_size == len(peer)
    assert tokenizer.bos_token_id == peer.bos_token_id
    assert tokenizer.eos_token_id == peer.eos_token_id
    assert tokenizer.special_tokens["pad_token"] == "<|tool|>"
    assert tokenizer.chat_template == "{{ messages }}"


def test_a_folder_with_two_templates(tmp_path):
    templates = {"default": "plain", "tool_use": "with tools"}
    save_folder(tmp_path, byte_level_backend(), chat_template=templates)
    tokenizer = load_tokenizer(tmp_path, format="orbax")
    assert tokenizer.chat_template == "plain"
    assert tokenizer.tool_chat_template == "with tools"
    message = [{"role": "user", "content": "x"}]
    assert render_conversation(tokenizer, message) == "plain"
    assert render_conversation(tokenizer, message, tools=[{"name": "f"}]) == "with tools"


def test_what_cannot_be_loaded_is_refused_by_name(tmp_path, offline):
    with pytest.raises(TokenizerError, match="no_such_folder' is neither a folder nor a hub id"):
        load_tokenizer(tmp_path / "no_such_folder", format="safetensors")
    with pytest.raises(TokenizerError, match="no tokenizer can be loaded"):
        load_tokenizer(tmp_path, format="safetensors")
    with pytest.raises(TokenizerError, match="'pickle' is not one of gguf, safetensors"):
        load_tokenizer(tmp_path, format="pickle")
    with pytest.raises(TokenizerError, match="org/missing-model"):
        load_tokenizer("org/missing-model", format="safetensors", revision="main")
    with pytest.raises(TokenizerError, match=r"nothing\.gguf"):
        load_tokenizer(tmp_path / "nothing.gguf", format="gguf")


def test_a_model_has_the_format_of_the_place_where_it_is_found(tmp_path, monkeypatch):
    folder, lone, both = tmp_path / "folder", tmp_path / "lone", tmp_path / "both"
    for path in (folder, both, tmp_path / "models"):
        path.mkdir()
        (path / "config.json").write_text("{}")
    lone.mkdir()
    for path in (lone, both):
        write_gguf(path / "a.gguf")
    expected = {
        str(folder): "safetensors",
        str(lone): "gguf",
        str(lone / "a.gguf"): "gguf",
        str(both): "safetensors",
        "models": "safetensors",
        "~/folder": "safetensors",
        "org/name": "safetensors",
        "org/name@main": "safetensors",
        "org/name:a.gguf": "gguf",
    }
    if smollm2_path() is not None:
        expected |= dict.fromkeys(PACKAGED, "gguf")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(
        hub, "download", lambda found, **_: lone / "a.gguf" if found.file else folder
    )
    for model, format in expected.items():
        assert tokenizer_format(model, is_model=True) == format, model
        found = resolve(model, load_format="dummy")
        assert tokenizer_format(found.path) == format, model


def test_the_tokenizer_of_another_model_may_be_a_hub_id_without_a_slash():
    assert tokenizer_format("gpt2") == "safetensors"
    assert tokenizer_format("gpt2", is_model=True) == "gguf"


@pytest.mark.parametrize("trust", [True, False])
def test_code_of_a_model_repository_is_never_run(tmp_path, trust):
    (tmp_path / "config.json").write_text('{"model_type": "martian"}')
    auto_map = {"AutoTokenizer": ["evil.EvilTokenizer", None]}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": auto_map, "tokenizer_class": "EvilTokenizer"})
    )
    marker = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass EvilTokenizer: pass\n")
    with pytest.raises(TokenizerError):
        load_tokenizer(tmp_path, format="safetensors", trust_remote_code=trust)
    assert not marker.exists()


def test_loading_imports_neither_torch_nor_jax(tmp_path):
    save_folder(tmp_path, byte_level_backend())
    code = (
        "import sys\n"
        "from jaxllm.text.tokenizer import load_tokenizer\n"
        "assert 'transformers' not in sys.modules\n"
        f"load_tokenizer({str(tmp_path)!r}, format='safetensors')\n"
        "assert not {'torch', 'jax', 'jaxlib'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "PyTorch" not in done.stderr


@pytest.mark.parametrize("text", ["\ud800", "fine \udfff", "\ud83d then \ude00"])
def test_lone_surrogates_are_refused(byte_level, text):
    with pytest.raises(UnencodableTextError, match="surrogate"):
        byte_level.encode(text)
    with pytest.raises(UnencodableTextError):
        byte_level.encode_batch(["fine", text])


def test_bad_ids_and_types_are_refused(byte_level):
    for bad in ([-1], [2**32], ["x"]):
        with pytest.raises(PromptError, match="token id"):
            byte_level.decode(bad)
    with pytest.raises(PromptError, match="token id -1"):
        byte_level.token_to_bytes(-1)
    with pytest.raises(PromptError, match="must be a string, not bytes"):
        byte_level.encode(b"x")


def test_bytes_of_tokens_are_exact(byte_level, sentencepiece):
    for tokenizer in (byte_level, sentencepiece):
        seen = {tokenizer.token_to_bytes(i) for i in range(tokenizer.vocab_size)}
        assert {bytes([byte]) for byte in range(256)} <= seen
    assert byte_level.token_to_bytes(byte_level.backend.token_to_id("  two spaces")) == (
        b"  two spaces"
    )
    assert byte_level.token_to_bytes(byte_level.backend.token_to_id("日")) == "日".encode()
    assert sentencepiece.token_to_bytes(sentencepiece.backend.token_to_id("▁the")) == b" the"
    assert sentencepiece.token_to_bytes(10**6) == b""


def test_bytes_of_tokens_join_to_the_text(every_tokenizer):
    for name in ("byte-level", "sentencepiece-no-strip", "smollm2"):
        if (tokenizer := every_tokenizer.get(name)) is None:
            continue
        for text in CORPUS:
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert b"".join(map(tokenizer.token_to_bytes, ids)).decode() == text


def test_the_joining_of_each_kind_is_recognised(every_tokenizer):
    found = {name: tokenizer.decoding for name, tokenizer in every_tokenizer.items()}
    assert found["byte-level"] == Decoding(Joining.BYTES)
    assert found["sentencepiece"] == Decoding(Joining.PIECES, strip_leading_space=True)
    assert found["sentencepiece-no-strip"] == Decoding(Joining.PIECES)
    assert found["words"] == found["metaspace"] == Decoding(Joining.OTHER)
    vocab = {piece: i for i, piece in enumerate(sentencepiece_vocab())}
    llama = LlamaTokenizer(vocab=vocab, merges=[("t", "h")])
    assert decoding_of(llama.backend_tokenizer) == found["sentencepiece"]


def test_spaces_between_special_tokens(every_tokenizer):
    words = every_tokenizer["words"]
    ids = words.encode("the <s> </s> fox", add_special_tokens=False)
    assert words.decode(ids, False) == "the <s> </s> fox"
    assert words.decode(ids, False, spaces_between_special_tokens=False) == "the <s></s> fox"
    assert words.decode(ids, True, spaces_between_special_tokens=False) == "the fox"


def test_truncation_left_on_in_a_file_does_not_cut_prompts(byte_level):
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer(backend, name="truncating")
    assert len(tokenizer.encode("one two three four five six")) > 8


def test_surrounding_ids(tmp_path):
    backend = byte_level_backend()
    save_folder(tmp_path, backend, add_bos_token=True, add_eos_token=True)
    tokenizer = load_tokenizer(tmp_path, format="safetensors")
    assert tokenizer.surrounding_ids == ([0], [1])
    assert Tokenizer(byte_level_backend(), name="bare").surrounding_ids == ([], [])


def test_threads_share_a_tokenizer(byte_level):
    texts = [f"{text} {i}" for i, text in enumerate(CORPUS * 40)]
    wanted = [byte_level.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(byte_level.encode, texts)) == wanted
        assert list(pool.map(byte_level.decode, wanted)) == texts


def test_the_packaged_model_equals_the_recording(smollm2):
    recording = json.loads(GOLDEN.read_text(encoding="utf-8"))
    for entry in recording["texts"]:
        assert smollm2.encode(entry["text"]) == entry["ids"]
        assert smollm2.encode(entry["text"], add_special_tokens=False) == entry["ids_plain"]
        assert smollm2.decode(entry["ids"]) == entry["decoded_skip_special"]
        assert smollm2.decode(entry["ids"], skip_special_tokens=False) == entry["decoded"]
    for entry in recording["chats"]:
        options = {"add_generation_prompt": entry["add_generation_prompt"]}
        assert render_conversation(smollm2, entry["messages"], **options) == entry["rendered"]
        assert encode_chat(smollm2, entry["messages"], **options) == entry["ids"]
