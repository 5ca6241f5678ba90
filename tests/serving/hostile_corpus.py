"""About a hundred requests that no honest client sends, and how each must be refused."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = "application/json"


@dataclasses.dataclass(frozen=True)
class Hostile:
    """One request. The body is made when it is sent: some are large."""

    name: str
    path: str
    body: Callable[[], bytes]
    statuses: tuple[int, ...] = (400,)
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = (("content-type", JSON),)


def _raw(name: str, path: str, body: bytes, *statuses: int) -> Hostile:
    return Hostile(name, path, lambda: body, statuses or (400,))


def _fields(path: str, fields: dict[str, Any], name: str = "") -> Hostile:
    good: dict[str, Any] = {"prompt": "Hello", "max_tokens": 2}
    if path == CHAT:
        good = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    body = json.dumps({**good, **fields}).encode()
    return Hostile(f"{path}: {name or str(fields)[:60]}", path, lambda: body)


def _deep(opening: bytes, closing: bytes, levels: int) -> bytes:
    return opening * levels + b"1" + closing * levels


def corpus() -> Iterator[Hostile]:
    yield from _sizes()
    yield from _syntax()
    yield from _types()
    yield from _numbers()
    yield from _texts()
    yield from _grammars()
    yield from _paths()


def _sizes() -> Iterator[Hostile]:
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        yield Hostile(
            f"{path}: 10 MB of text",
            path,
            lambda: b'{"prompt": "' + b"word " * 2_000_000 + b'"}',
            (400, 413),
        )
    yield Hostile("10 MB of brackets", COMPLETIONS, lambda: b"[" * 10_000_000, (400, 413))
    yield Hostile("7 MB of ids", COMPLETIONS, lambda: b'{"prompt": [' + b"5," * 3_500_000 + b"5]}")
    yield Hostile("7 MB of text", COMPLETIONS, lambda: b'{"prompt": "' + b"a " * 3_500_000 + b'"}')
    yield Hostile(
        "a million messages",
        CHAT,
        lambda: b'{"messages": [' + b'{"role":"user","content":""},' * 200_000 + b"{}]}",
    )
    yield Hostile(
        "10,000 prompts", COMPLETIONS, lambda: json.dumps({"prompt": ["a"] * 10_000}).encode()
    )
    yield Hostile(
        "100,000 keys of logit_bias",
        COMPLETIONS,
        lambda: json.dumps(
            {"prompt": "x", "logit_bias": {str(i): 1 for i in range(100_000)}}
        ).encode(),
    )
    yield _fields(COMPLETIONS, {"stop": ["a"] * 100_000}, "100,000 stop strings")
    yield _fields(COMPLETIONS, {"bad_words": ["a b"] * 100_000}, "100,000 bad words")
    yield _fields(COMPLETIONS, {"prompt": ["a"] * 1024, "n": 1024}, "a million choices")
    tool = {"type": "function", "function": {"name": "f"}}
    yield _fields(CHAT, {"tools": [tool] * 10_000}, "10,000 tools")


def _syntax() -> Iterator[Hostile]:
    for path in (COMPLETIONS, CHAT):
        for opening, closing in ((b"[", b"]"), (b'{"a":', b"}"), (b'[{"a":', b"}]")):
            body = b'{"prompt": "x", "messages": ' + _deep(opening, closing, 10_000) + b"}"
            yield _raw(f"{path}: {opening!r} 10,000 deep", path, body)
        for body in (
            b"",
            b"{",
            b"[]",
            b"null",
            b"true",
            b'"text"',
            b"5",
            b"{}",
            b"{'prompt': 'x'}",
            b"prompt=x",
            b"\x00\x01\x02",
            b"\xef\xbb\xbf{}",
            b'{"prompt": "x"} {"prompt": "y"}',
            b'{"prompt": "x",}',
            b'{"prompt": "x" "messages": 1}',
            b'{"prompt": "\n", "messages": "\n"}',
            '{"prompt": "x"}'.encode("utf-16"),
            '{"prompt": "x"}'.encode("utf-32"),
        ):
            yield _raw(f"{path}: {body[:30]!r}", path, body)


def _types() -> Iterator[Hostile]:
    wrong: dict[str, list[Any]] = {
        "max_tokens": ["ten", 1.5, [1], {}, True],
        "temperature": ["hot", [], {}, False],
        "top_p": ["most", {}],
        "top_k": ["k", 1.5],
        "min_p": ["x"],
        "n": ["x", [1], 1.5, True],
        "stream": ["yes", 1, []],
        "stop": [5, [1], {"a": 1}, [None]],
        "seed": ["abc", [], 1.5],
        "stop_token_ids": ["x", ["y"], 3, [None], [1.5]],
        "ignore_eos": ["yes", 1],
        "bad_words": ["word", 3, [1]],
        "allowed_token_ids": [{}, "x"],
        "logit_bias": [[1], "x", 3, {"5": None}],
        "response_format": ["json", 5, []],
        "structured_outputs": ["json", 5, []],
        "stream_options": ["x", 3],
        "stream_interval": ["x", 0, -1],
        "model": [5, [], {}],
        "user": [5],
        "request_id": [5, []],
        "cache_salt": [5, []],
        "priority": ["high", 1.5],
    }
    for field, values in wrong.items():
        for value in values:
            yield _fields(COMPLETIONS, {field: value})
            yield _fields(CHAT, {field: value})
    for value in (5, {}, "x", [5], ["x"], [None], [[]], [{}]):
        yield _fields(CHAT, {"messages": value})
    for value in (5, {}, "x", [5], [{}], [{"type": "function"}]):
        yield _fields(CHAT, {"tools": value})
    for value in (5, {"a": 1}, [1, "a"], [[1], "a"], [1.5], [None], [[[1]]], [True]):
        yield _fields(COMPLETIONS, {"prompt": value})


def _numbers() -> Iterator[Hostile]:
    integers = (
        "n",
        "top_k",
        "min_tokens",
        "prompt_logprobs",
        "seed",
        "priority",
        "stream_interval",
    )
    for field in integers:
        for value in (2**63, 2**64, 10**30, -(2**63) - 1, -(10**30)):
            yield _fields(COMPLETIONS, {field: value})
        yield _raw(
            f"{field} of 10,000 digits", CHAT, b'{"%s": %s}' % (field.encode(), b"9" * 10_000)
        )
    for value in (2**31, 2**32 + 5, 2**63, -1, -(2**31), 10**30):
        yield _fields(COMPLETIONS, {"prompt": [value]})
        yield _fields(COMPLETIONS, {"stop_token_ids": [value]})
        yield _fields(COMPLETIONS, {"allowed_token_ids": [value]})
        yield _fields(COMPLETIONS, {"logit_bias": {str(value): 1}})
        yield Hostile(f"detokenize {value}", "/detokenize", _dumped({"tokens": [value]}))
    for word in (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999"):
        for field in (
            b"temperature",
            b"top_p",
            b"min_p",
            b"repetition_penalty",
            b"presence_penalty",
        ):
            body = b'{"prompt": "x", "messages": [], "%s": %s}' % (field, word)
            yield _raw(f"{field.decode()} {word.decode()}", COMPLETIONS, body)
    yield _raw("bias of 1e999", COMPLETIONS, b'{"prompt": "x", "logit_bias": {"5": 1e999}}')


def _dumped(value: Any) -> Callable[[], bytes]:
    return lambda: json.dumps(value).encode()


def _texts() -> Iterator[Hostile]:
    lone = b'"\\ud800"'
    yield _raw("lone surrogate, prompt", COMPLETIONS, b'{"prompt": %s}' % lone)
    yield _raw("lone surrogate, stop", COMPLETIONS, b'{"prompt": "x", "stop": %s}' % lone)
    yield _raw("lone surrogate, key", COMPLETIONS, b'{"prompt": "x", "logit_bias": {%s: 1}}' % lone)
    yield _raw(
        "lone surrogate, message",
        CHAT,
        b'{"messages": [{"role": "user", "content": %s}]}' % lone,
    )
    yield _raw("lone surrogate, tokenize", "/tokenize", b'{"prompt": %s}' % lone)
    yield _raw("bytes that are no UTF-8", COMPLETIONS, b'{"prompt": "\xff\xfe"}')
    yield _raw("an overlong slash", COMPLETIONS, b'{"prompt": "\xc0\xaf"}')
    for value in ("", "a b", "a\nb", "a\0b", "a\x1b[2J", "x" * 129, "é", "../../etc", "a/b"):
        yield _fields(COMPLETIONS, {"request_id": value})
    for value in ("", "a/b", "a\\b", "a@b", "a\0b", "x" * 129):
        yield _fields(COMPLETIONS, {"cache_salt": value})
    for value in ("x\0y", "\r\nX-Evil: 1", "../model"):
        body = _fields(COMPLETIONS, {"model": value})
        yield dataclasses.replace(body, statuses=(404,))
    for header in ("a\x7fb", "x" * 200, "a b\tc"):
        yield Hostile(
            f"X-Request-Id {header[:10]!r}",
            COMPLETIONS,
            _dumped({"prompt": "x", "max_tokens": 1}),
            headers=(("content-type", JSON), ("x-request-id", header)),
        )


def _grammars() -> Iterator[Hostile]:
    for value in (
        {"regex": "("},
        {"regex": ""},
        {"regex": "a\0b"},
        {"regex": "(?<=a)b"},
        {"grammar": "start: ("},
        {"grammar": "\0"},
        {"json": "{"},
        {"json": {"type": "nonsense"}},
        {"json": {"$ref": "http://127.0.0.1:9/x.json"}},
        {"json": {"$ref": "file:///etc/passwd"}},
        {"choice": []},
        {"choice": [""]},
        {"choice": "abc"},
        {"json_object": False},
        {"choice": ["a"], "regex": "a"},
        {},
        {"unknown": 1},
    ):
        yield _fields(COMPLETIONS, {"structured_outputs": value})
    for value in (
        {},
        {"type": "json_schema"},
        {"type": "x"},
        {"type": "json_schema", "json_schema": 5},
    ):
        yield _fields(CHAT, {"response_format": value})
    for value in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for i in range(10**9) %}x{% endfor %}",
    ):
        yield _fields(CHAT, {"chat_template": value})
    yield _fields(CHAT, {"chat_template_kwargs": {"messages": []}})
    yield _fields(CHAT, {"chat_template_kwargs": {"tools": "x"}})
    for url in ("http://169.254.169.254/", "file:///etc/passwd", "data:image/png;base64,AAAA"):
        part = {"type": "image_url", "image_url": {"url": url}}
        yield _fields(CHAT, {"messages": [{"role": "user", "content": [part]}]}, url)


def _paths() -> Iterator[Hostile]:
    for path in (
        "/v1/completions/",
        "/v1//completions",
        "//v1/completions",
        "/v1/../v1/nothing",
        "/v1/%2e%2e/nothing",
        "/v1/completions%00",
        "/v1/completions;x=1",
        "/V1/COMPLETIONS",
        "/etc/passwd",
        "/pause",
        "/reset_prefix_cache",
        "/collective_rpc",
        "/v1/models/../../x",
    ):
        yield Hostile(f"path {path}", path, lambda: b"{}", (307, 404, 405))
    yield Hostile("no such model", "/v1/models/%2e%2e%2f", lambda: b"", (404,), "GET")
    for method in ("GET", "PUT", "DELETE", "PATCH"):
        yield Hostile(f"{method} on a POST path", COMPLETIONS, lambda: b"", (405,), method)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        yield Hostile(
            f"content type {kind!r}",
            COMPLETIONS,
            _dumped({"prompt": "x"}),
            headers=(("content-type", kind),),
        )
    yield Hostile(
        "200 headers",
        COMPLETIONS,
        _dumped({"prompt": "x"}),
        (431,),
        headers=(("content-type", JSON), *((f"x-{i}", "1") for i in range(200))),
    )
    for query in ("seconds=-1", "seconds=nan", "seconds=1e9", "seconds=x", "queue_target=inf"):
        yield Hostile(f"diagnose {query}", f"/diagnose?{query}", lambda: b"", (400,), "GET")
