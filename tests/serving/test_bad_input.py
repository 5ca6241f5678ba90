"""What is not valid is refused with a 4xx that names the field, and the server lives on."""

import json

import httpx
import pytest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]

VALUES = [
    {"temperature": -1},
    {"temperature": 2.5},
    {"temperature": "hot"},
    {"top_p": 0},
    {"top_p": 1.5},
    {"top_k": -5},
    {"top_k": 1.5},
    {"min_p": 1.1},
    {"presence_penalty": 3},
    {"frequency_penalty": "a"},
    {"repetition_penalty": 0},
    {"n": 0},
    {"n": 10**6},
    {"n": 2**70},
    {"n": True},
    {"max_tokens": -1},
    {"max_tokens": "ten"},
    {"max_tokens": 2**63},
    {"max_tokens": 10**30},
    {"stream_interval": 0},
    {"min_tokens": -1},
    {"min_tokens": 5, "max_tokens": 4},
    {"prompt_logprobs": 21},
    {"prompt_logprobs": -1},
    {"prompt_logprobs": -5},
    {"stop": ""},
    {"stop": ["a", ""]},
    {"stop": list("abcde")},
    {"stop": 5},
    {"stop_token_ids": ["x"]},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": [10**6]},
    {"seed": 2**64},
    {"seed": 1.5},
    {"bad_words": [""]},
    {"bad_words": "word"},
    {"allowed_token_ids": []},
    {"allowed_token_ids": [99999]},
    {"logit_bias": {"cat": 1}},
    {"logit_bias": {"5": "much"}},
    {"logit_bias": {"999999": 1}},
    {"logit_bias": [1]},
    {"cache_salt": ""},
    {"cache_salt": "a/b"},
    {"stream": "perhaps"},
    {"stream_options": {"include_usage": True}},
    {"response_format": "json"},
    {"response_format": {"type": "nonsense"}},
    {"response_format": {"type": "json_schema"}},
    {"structured_outputs": {"choice": ["a"], "regex": "a"}},
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"unknown": 1}},
    {"use_beam_search": True},
    {"ignore_eos": "perhaps"},
    {"priority": 2**64},
    {"request_id": "a b"},
    {"truncation_side": "middle"},
]


@pytest.mark.parametrize("fields", VALUES, ids=json.dumps)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_bad_value_is_refused(server, path, fields):
    body = {"prompt": "Hello", "messages": MESSAGES, "max_tokens": 2, **fields}
    reply = server.post(path, body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["type"] == "BadRequestError"
    assert error["message"]
    assert error["param"] is None or error["param"].partition(".")[0] in fields


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": None},
        {"prompt": 5},
        {"prompt": {"a": 1}},
        {"prompt": [1, "a"]},
        {"prompt": [1.5]},
        {"prompt": [[[1]]]},
        {"prompt": [-1]},
        {"prompt": [272]},
        {"prompt": [2**70]},
        {"prompt": ["a"] * 10_000},
        {"prompt": [5] * 512},
        {"prompt": "word " * 4000},
        {"logprobs": 21},
        {"logprobs": -1},
        {"logprobs": -5},
        {"logprobs": "many"},
        {"suffix": "x"},
        {"max_tokens": 0},
        {"prompt_logprobs": 1, "stream": True},
    ],
    ids=lambda fields: json.dumps(fields)[:40],
)
def test_a_bad_completion_is_refused(server, fields):
    reply = server.post(COMPLETIONS, {"prompt": "Hello", **fields})
    assert reply.status_code == 400, reply.text


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": None},
        {"messages": "hi"},
        {"messages": ["hi"]},
        {"messages": [{"content": "hi"}]},
        {"messages": [{"role": 5, "content": "hi"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"top_logprobs": 2},
        {"logprobs": True, "top_logprobs": 21},
        {"logprobs": True, "top_logprobs": -1},
        {"logprobs": 5},
        {"max_completion_tokens": 0},
        {"tools": []},
        {"tools": "x"},
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
        {"tool_choice": 5},
        {
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": {"type": "function", "function": {"name": "g"}},
        },
        {"chat_template": "{{ 1 }}"},
        {"chat_template_kwargs": {"messages": []}},
        {"add_generation_prompt": True, "continue_final_message": True},
    ],
    ids=lambda fields: json.dumps(fields)[:40],
)
def test_a_bad_chat_is_refused(server, fields):
    reply = server.post(CHAT, {"messages": MESSAGES, **fields})
    assert reply.status_code == 400, reply.text


DEEP = b'{"prompt": "x", "logit_bias": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"{}",
        b"{'a': 1}",
        b"\x00\x01",
        b'{"prompt": NaN}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        DEEP,
    ],
    ids=lambda raw: repr(raw[:30]),
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_bad_body_is_refused(server, path, raw):
    reply = server.client.post(path, content=raw, headers={"content-type": "application/json"})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["message"]
    assert server.get("/health").status_code == 200


def test_a_huge_body_is_refused_and_the_connection_goes_on(server):
    body = json.dumps({"prompt": "word " * 2_000_000}).encode()
    headers = {"content-type": "application/json"}
    assert server.client.post(COMPLETIONS, content=body, headers=headers).status_code == 413
    assert server.complete(max_tokens=1)


def test_content_types_paths_methods_and_models(server):
    body = json.dumps({"prompt": "x"})
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        reply = server.client.post(COMPLETIONS, content=body, headers={"content-type": kind})
        assert reply.status_code == 400
    assert server.get("/v1/nothing").status_code == 404
    assert server.get(COMPLETIONS).status_code == 405
    for path in (COMPLETIONS, CHAT):
        fields = {"prompt": "x", "messages": MESSAGES, "model": "no-such-model"}
        reply = server.post(path, fields)
        assert reply.status_code == 404
        assert reply.json()["error"]["type"] == "NotFoundError"


def test_headers_are_limited(server):
    headers = {"x-big": "a" * 300_000}
    try:
        reply = server.client.post(COMPLETIONS, json={"prompt": "x"}, headers=headers)
        assert reply.status_code in (400, 431)
    except httpx.TransportError:
        # It may close before it has read all, so that the answer is lost.
        pass
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize("value", [2**31, 2**63 - 1])
def test_a_huge_limit_is_cut_to_the_context(server, value):
    fields = {"max_tokens": value, "logit_bias": {"1": 100}, "temperature": 0}
    assert server.complete(**fields)["usage"]["completion_tokens"] == 1


def test_one_bad_request_does_not_disturb_another(server):
    before = server.complete(max_tokens=6, temperature=0)["choices"][0]["text"]
    failed = server.post(COMPLETIONS, {"prompt": [250], "max_tokens": 2})
    assert failed.status_code == 500
    assert "device lost" not in failed.text
    assert server.complete(max_tokens=6, temperature=0)["choices"][0]["text"] == before


def test_a_request_larger_than_the_pool_is_refused(launch):
    server = launch("--num-blocks=9")
    reply = server.post(COMPLETIONS, {"prompt": [5] * 200, "max_tokens": 50})
    assert reply.status_code == 400
    assert "blocks" in reply.json()["error"]["message"]
    server.complete(max_tokens=4)
