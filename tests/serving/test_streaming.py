"""Streams join to what is not streamed, end once, and end early when the client leaves."""

import itertools
import json
import socket
import time
from pathlib import Path

import pytest

GREEDY = {"temperature": 0, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}


def joined(chunks, index=0):
    text, finishes = "", []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                assert not finishes, "a piece after the last one"
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                if choice["finish_reason"] is not None:
                    finishes.append(choice["finish_reason"])
    assert len(finishes) == 1
    return text, finishes[0]


def test_completion_stream_joins_to_the_whole(server):
    want = server.complete(max_tokens=30, **GREEDY)["choices"][0]
    chunks = server.stream("/v1/completions", {"prompt": "Hello", "max_tokens": 30, **GREEDY})
    assert joined(chunks) == (want["text"], "length")
    assert len({(c["id"], c["object"], c["created"], c["model"]) for c in chunks}) == 1
    assert all("usage" not in c for c in chunks)


def test_chat_stream_joins_to_the_whole(server):
    want = server.chat(max_tokens=30, **GREEDY)["choices"][0]["message"]["content"]
    chunks = server.stream("/v1/chat/completions", {**CHAT, "max_tokens": 30, **GREEDY})
    assert joined(chunks) == (want, "length")
    first = chunks[0]["choices"][0]["delta"]
    assert first == {"role": "assistant", "content": ""}
    assert {c["choices"][0]["delta"].get("role") for c in chunks[1:]} == {None}
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage(server, path):
    body = {**CHAT, "prompt": "Hello", "max_tokens": 7, **GREEDY}
    chunks = server.stream(path, {**body, "stream_options": {"include_usage": True}})
    assert [c for c in chunks if "usage" in c] == chunks[-1:]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 7
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = server.stream(path, {**body, "stream_options": options})
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 7


def test_samples_and_prompts(server):
    fields = {"n": 2, "max_tokens": 9, "temperature": 0.9, "seed": 3, "ignore_eos": True}
    want = server.complete(["ab", "cd"], **fields)["choices"]
    chunks = server.stream("/v1/completions", {"prompt": ["ab", "cd"], **fields})
    for index in range(4):
        assert joined(chunks, index) == (want[index]["text"], "length")


def test_logprobs_and_ids(server):
    body = {"prompt": "Hello", "max_tokens": 8, "logprobs": 2, "return_token_ids": True, **GREEDY}
    want = server.complete(**body)["choices"][0]
    pieces = [c["choices"][0] for c in server.stream("/v1/completions", body)]
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [x for p in pieces for x in p["logprobs"][key]] == want["logprobs"][key]
    assert [x for p in pieces for x in p["token_ids"]] == want["token_ids"]
    assert sum("prompt_token_ids" in p for p in pieces) == 1


def test_chat_logprobs(server):
    body = {"max_tokens": 8, "logprobs": True, "top_logprobs": 2, **GREEDY}
    want = server.chat(**body)["choices"][0]
    entries = want["logprobs"]["content"]
    assert len(entries) == 8
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    text = b"".join(bytes(entry["bytes"]) for entry in entries).decode("utf-8", "replace")
    assert text == want["message"]["content"]
    chunks = server.stream("/v1/chat/completions", {**CHAT, **body})
    streamed = [c["choices"][0]["logprobs"] for c in chunks]
    assert [e for s in streamed if s for e in s["content"]] == entries


def test_echo(server):
    body = {"prompt": "Hello", "max_tokens": 5, "echo": True, **GREEDY}
    want = server.complete(**body)["choices"][0]["text"]
    assert joined(server.stream("/v1/completions", body)) == (want, "length")


def test_no_character_of_a_stop_string_leaves(server):
    (x,) = server.post("/tokenize", {"prompt": "x"}).json()["tokens"]
    body = {"prompt": "a", "max_tokens": 9, "logit_bias": {str(x): 100}, **GREEDY}
    held = server.stream("/v1/completions", {**body, "stop": ["xxxx"]})
    assert joined(held) == ("", "stop")
    flushed = server.stream("/v1/completions", {**body, "stop": ["x" * 20]})
    assert joined(flushed) == ("x" * 9, "length")


def test_errors_come_before_the_stream(server):
    for body in ({"prompt": "x", "temperature": -1}, {"prompt": [5] * 600}, {"prompt": [250]}):
        reply = server.post("/v1/completions", {**body, "stream": True})
        assert reply.status_code in (400, 500)
        assert reply.json()["error"]["code"] == reply.status_code


def test_a_client_that_leaves_ends_its_request(launch):
    server = launch(stub={"step_seconds": 0.005})
    long = {"prompt": "Hello", "max_tokens": 400, **GREEDY}
    for _ in range(8):
        server.stream("/v1/completions", long, stop_after=2)
        server.stream("/v1/chat/completions", {**CHAT, **long}, stop_after=3)
    server.wait_idle(3)
    aborted = server.metric("request_success_total", finished_reason="abort")
    assert aborted == 16
    # One that is not streamed.
    request = server.client.build_request("POST", "/v1/completions", json=long)
    body = request.read()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while not server.metric("num_requests_running"):
            pass
    server.wait_idle(3)
    assert server.metric("request_success_total", finished_reason="abort") == 17
    assert json.loads(body)["max_tokens"] == 400


def ends(pieces):
    """Output tokens after each piece. The first and last come when they are ready; where the
    reader is slow, neighbours are one piece."""
    return set(itertools.accumulate(len(piece["token_ids"]) for piece in pieces))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_stream_interval(server, path):
    body = {**CHAT, "prompt": "Hello", "max_tokens": 20, "return_token_ids": True, **GREEDY}
    every, eighth = (
        [
            choice
            for chunk in server.stream(path, {**body, **more})
            for choice in chunk["choices"]
            if choice.get("token_ids")
        ]
        for more in ({}, {"stream_interval": 8})
    )
    assert ends(eighth) <= {1, 9, 17, 20}
    assert [i for c in eighth for i in c["token_ids"]] == [i for c in every for i in c["token_ids"]]


def test_the_servers_interval_is_the_least(launch):
    server = launch("--stream-interval=5")
    body = {"prompt": "Hello", "max_tokens": 12, "return_token_ids": True, **GREEDY}
    chunks = server.stream("/v1/completions", {**body, "stream_interval": 2})
    assert ends([chunk["choices"][0] for chunk in chunks]) <= {1, 6, 11, 12}


def test_a_reader_that_does_not_read_holds_nothing_up(launch):
    server = launch(stub={"step_seconds": 0.002})
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps(
        {"prompt": "x", "max_tokens": 480, "logprobs": 20, "stream": True, "n": 4, "temperature": 1}
        | {"ignore_eos": True}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    with socket.socket() as stalled:
        # So small a window fills at once.
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect((host, int(port)))
        stalled.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        while server.metric("num_requests_running") < 4:
            pass
        before = memory(server)
        want = server.complete(max_tokens=100, **GREEDY)["choices"][0]["text"]
        server.wait_idle(20)
        # All of it was generated, and what was not read is kept once.
        assert server.metric("request_success_total", finished_reason="length") == 5
        assert memory(server) - before < 16 * 2**20
        assert server.complete(max_tokens=100, **GREEDY)["choices"][0]["text"] == want


def memory(server):
    for line in Path(f"/proc/{server.process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def test_blanks_and_newlines_survive(launch):
    text = "  lead\n\n\n    if x:\n\treturn  1  \n \n"
    server = launch(stub={"script": text})
    body = {"prompt": "x", "max_tokens": 100, "temperature": 0, "return_token_ids": True}
    choice = server.complete(**body)["choices"][0]
    assert choice["text"] == text
    ids = [token for token in choice["token_ids"] if token != 1]
    assert server.post("/detokenize", {"tokens": ids}).json()["prompt"] == text
    assert joined(server.stream("/v1/completions", body)) == (text, "stop")
    chat = {**CHAT, "max_tokens": 100, "temperature": 0}
    assert joined(server.stream("/v1/chat/completions", chat)) == (text, "stop")


def test_a_client_of_http_1_0_gets_the_stream_without_chunks(server):
    want = server.complete(max_tokens=9, **GREEDY)["choices"][0]["text"]
    body = json.dumps({"prompt": "Hello", "max_tokens": 9, "stream": True, **GREEDY}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        head = "POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
        sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = b"".join(iter(lambda: sock.recv(4096), b""))
    events = answer.partition(b"\r\n\r\n")[2].decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    text = "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-2])
    assert text == want


def test_a_reader_that_pauses_gets_the_same_text(server):
    body = {"prompt": ["a", "b", "c", "d"], "max_tokens": 200, "logprobs": 5, **GREEDY}
    want = server.complete(**body)["choices"]
    data = json.dumps({**body, "stream": True}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as sock:
        # A window so small that the server has to wait again and again.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.connect((host, int(port)))
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        head += "Content-Type: application/json\r\n"
        sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        time.sleep(0.5)
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    rest, body = answer.partition(b"\r\n\r\n")[2], b""
    while rest and not rest.startswith(b"0\r\n"):
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    events = [json.loads(e[6:]) for e in body.decode().split("\n\n")[:-1] if e != "data: [DONE]"]
    for index in range(4):
        assert joined(events, index) == (want[index]["text"], "length")
