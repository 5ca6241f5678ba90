import io
import json

import pytest

from jaxllm import cli
from tests.models.families import DATA

ENGINE = [
    str(DATA / "tiny_chat"), "--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "2",
    "--max-num-batched-tokens", "32", "--kv-cache-memory", "4MiB", "--enforce-eager", "-q",
]  # fmt: skip


def test_generate_prints_prompt_and_continuation(capsys):
    words = ["generate", *ENGINE, "--prompt", "ab", "--temperature", "0", "--max-tokens", "5"]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert text.startswith("ab") and len(text) > 3
    assert cli.main([*words, "--json", "--ignore-eos"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["prompt"] == "ab" and len(record["token_ids"]) == 5
    assert record["finish_reason"] == "length"


def test_a_prompt_comes_from_a_file_or_from_standard_input(capsys, tmp_path, monkeypatch):
    path = tmp_path / "prompt.txt"
    path.write_text("from a file")
    options = ["--temperature", "0", "--max-tokens", "3"]
    assert cli.main(["generate", *ENGINE, "--file", str(path), *options]) == 0
    assert capsys.readouterr().out.startswith("from a file")
    monkeypatch.setattr("sys.stdin", io.StringIO("piped text\n"))
    assert cli.main(["generate", *ENGINE, *options]) == 0
    assert capsys.readouterr().out.startswith("piped text")


def test_chat_answers_once(capsys):
    words = ["chat", *ENGINE, "--prompt", "hello", "--temperature", "0", "--max-tokens", "4"]
    assert cli.main([*words, "--ignore-eos"]) == 0
    assert capsys.readouterr().out.strip()


def test_errors_are_one_line_with_the_cause(capsys):
    assert cli.main(["generate", "/no/such/model", "--prompt", "x"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxllm: error:") and "/no/such/model" in error
    assert cli.main(["generate", *ENGINE, "--prompt", "x", "--temperature", "7"]) == 2
    assert "temperature=7.0" in capsys.readouterr().err


def test_no_prompt_is_an_error(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert cli.main(["generate", *ENGINE]) == 2
    assert "no prompt" in capsys.readouterr().err


def test_every_command_has_help(capsys):
    for command in ("generate", "chat", "serve", "diagnose", "convert", "plan", "simulate"):
        with pytest.raises(SystemExit) as ended:
            cli.main([command, "--help"])
        assert ended.value.code == 0
        assert "usage: jaxllm" in capsys.readouterr().out
