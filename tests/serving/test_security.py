"""Rules that known vulnerabilities of servers of this kind teach."""

import itertools
import json
import os
import shutil
import stat
import time
from pathlib import Path

import pytest

from serving.tools.parsers import PARSERS
from tests.serving.conftest import running_server

MESSAGES = [{"role": "user", "content": "Hello"}]


def sockets(pid: int) -> list[tuple[str, str, str]]:
    """(local address, remote address, state) of a process's TCP sockets."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue
        if target.startswith("socket:"):
            inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes:
                found.append((fields[1], fields[2], fields[3]))
    return found


def test_only_localhost_is_listened_at_and_nothing_is_called(server):
    server.complete(max_tokens=1)
    processes = [server.process.pid, *server.children()]
    found = [each for pid in processes for each in sockets(pid)]
    assert found
    # 0100007F is 127.0.0.1; a listener's peer is 0.
    for local, remote, _ in found:
        assert local.startswith("0100007F:")
        assert remote.startswith(("0100007F:", "00000000:"))
    assert sum(state == "0A" for _, _, state in found) == 1


def test_only_this_user_reaches_the_engine(server):
    (engine,) = server.children()
    words = Path(f"/proc/{engine}/cmdline").read_text().split("\0")
    (address,) = [word for word in words if word.startswith("ipc://")]
    folder = Path(address.removeprefix("ipc://")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.stat().st_uid == os.getuid()


def test_keys_are_not_told(launch, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("first-secret\nsecond-secret\n")
    server = launch(f"--api-key-file={keys}", "--access-log", "-v")
    body = {"prompt": "a private thought", "max_tokens": 1}
    for key, status in (("first-secret", 200), ("second-secret", 200), ("guess-secret", 401)):
        headers = {"authorization": f"Bearer {key}"}
        assert server.post("/v1/completions", body, headers=headers).status_code == status
    shown = server.log.read_text() + server.get("/metrics").text + server.get("/openapi.json").text
    for pid in (server.process.pid, *server.children()):
        shown += Path(f"/proc/{pid}/cmdline").read_text()
    assert "secret" not in shown
    assert "private" not in shown


def test_metrics_do_not_tell_where_files_lie(server, model_folder):
    assert str(model_folder) not in server.get("/metrics").text


OPTIONS = {
    "temperature": 0.7,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "presence_penalty": 1.0,
    "frequency_penalty": -1.0,
    "repetition_penalty": 1.3,
    "seed": 7,
    "n": 2,
    "stop": ["e"],
    "stop_token_ids": [9],
    "bad_words": ["the"],
    "allowed_token_ids": [5, 6, 7],
    "logit_bias": {"8": 5},
    "ignore_eos": True,
    "min_tokens": 2,
    "logprobs": 2,
    "prompt_logprobs": 1,
    "echo": True,
    "stream": True,
    "stream_interval": 2,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "structured_outputs": {"choice": ["ab", "cd"]},
    "truncate_prompt_tokens": 3,
    "return_token_ids": True,
    "cache_salt": "x",
    "priority": 3,
    "prompt": ["Hello", "the an"],
}


@pytest.mark.parametrize("chosen", OPTIONS)
def test_no_pair_of_options_breaks_the_engine(server, chosen):
    for other in OPTIONS:
        pair = {chosen: OPTIONS[chosen], other: OPTIONS[other]}
        body = {"prompt": "Hello", "max_tokens": 3, **pair}
        assert server.post("/v1/completions", body).status_code in (200, 400), pair
    assert server.complete(max_tokens=1)


def test_no_repository_code_is_run(tmp_path, model_folder):
    """A tokenizer that names code of its own is loaded without it."""
    folder = tmp_path / "evil"
    shutil.copytree(model_folder, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["evil.Tokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    mark = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w')")
    with running_server(folder) as server:
        server.complete(max_tokens=1)
    assert not mark.exists()


def test_scanners_of_tool_calls_take_linear_time():

    pieces = (
        '<tool_call>{"name": "f", "arguments": {"a": "',
        "{[",
        '"\\',
        "<tool_call",
        "[TOOL_CALLS]",
    )
    for (name, make), piece in itertools.product(PARSERS.items(), pieces):
        seconds = []
        for repeats in (2000, 8000):
            best = 60.0
            for _ in range(3):
                parser = make(frozenset({"f"}))
                text = piece * repeats
                began = time.perf_counter()
                for start in range(0, len(text), 64):
                    parser.feed(text[start : start + 64])
                parser.finish()
                best = min(best, time.perf_counter() - began)
            seconds.append(best)
        # Four times the text: sixteen times the time would be quadratic.
        assert seconds[1] < 10 * seconds[0] + 0.05, (name, piece, seconds)
