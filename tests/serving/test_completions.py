"""/v1/completions against a server whose engine is made of Python."""

import concurrent.futures

import pytest

GREEDY = {"temperature": 0, "ignore_eos": True}


def choice(server, prompt="Hello", **fields):
    return server.complete(prompt, **fields)["choices"][0]


def test_shape_and_usage(server):
    body = server.complete("Hello", max_tokens=5, **GREEDY)
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["completion_tokens"] == 5
    assert body["usage"]["total_tokens"] == 10
    (only,) = body["choices"]
    assert only["index"] == 0
    assert only["finish_reason"] == "length"
    assert only["logprobs"] is None


@pytest.mark.parametrize("fields", [{}, {"max_tokens": None}])
def test_sixteen_tokens_unless_said_otherwise(server, fields):
    assert server.complete(**fields, **GREEDY)["usage"]["completion_tokens"] == 16


def test_the_context_limits_the_output(server):
    body = server.complete(list(range(4, 4 + 200)) + [5] * 300, max_tokens=100, **GREEDY)
    assert body["usage"]["completion_tokens"] == 12
    assert body["choices"][0]["finish_reason"] == "length"


def test_lists_of_prompts_give_choices_in_order(server):
    prompts = ["one", "two", "three"]
    alone = [choice(server, prompt, max_tokens=6, **GREEDY)["text"] for prompt in prompts]
    together = server.complete(prompts, max_tokens=6, **GREEDY)
    assert [c["index"] for c in together["choices"]] == [0, 1, 2]
    assert [c["text"] for c in together["choices"]] == alone
    assert together["usage"]["completion_tokens"] == 18
    ids = [server.post("/tokenize", {"prompt": p}).json()["tokens"] for p in prompts]
    by_ids = server.complete(ids, max_tokens=6, **GREEDY)
    assert [c["text"] for c in by_ids["choices"]] == alone


def test_samples_are_grouped_by_prompt(server):
    body = server.complete(["a", "b"], n=2, max_tokens=4, seed=1, temperature=1.0, ignore_eos=True)
    texts = [c["text"] for c in body["choices"]]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    for prompt, first in (("a", 0), ("b", 2)):
        alone = server.complete(prompt, n=2, max_tokens=4, seed=1, temperature=1.0, ignore_eos=True)
        assert [c["text"] for c in alone["choices"]] == texts[first : first + 2]
    assert texts[0] != texts[1]


def test_echo_puts_the_prompt_first(server):
    plain = choice(server, max_tokens=4, **GREEDY)["text"]
    assert choice(server, max_tokens=4, echo=True, **GREEDY)["text"] == "Hello" + plain
    prompt_only = server.complete("Hello", max_tokens=0, echo=True, logprobs=1, **GREEDY)
    assert prompt_only["choices"][0]["text"] == "Hello"
    assert prompt_only["usage"]["completion_tokens"] == 0
    logprobs = prompt_only["choices"][0]["logprobs"]
    assert logprobs["tokens"] == list("Hello")
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][1]["e"] == logprobs["token_logprobs"][1]


def test_logprobs(server):
    logprobs = choice(server, max_tokens=6, logprobs=3, **GREEDY)["logprobs"]
    assert {len(v) for v in logprobs.values()} == {6}
    for token, value, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert len(top) == 3
        assert value in top.values()
        assert token in top or not token
    at = 0
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert offset == at
        at += len(token)
    sampled_only = choice(server, max_tokens=2, logprobs=0, **GREEDY)["logprobs"]
    assert [len(top) for top in sampled_only["top_logprobs"]] == [1, 1]
    named = choice(server, max_tokens=2, logprobs=1, return_tokens_as_token_ids=True, **GREEDY)
    assert all(token.startswith("token_id:") for token in named["logprobs"]["tokens"])


def test_prompt_logprobs(server):
    ids = [5, 6, 7, 8]
    rows = choice(server, ids, max_tokens=1, prompt_logprobs=2)["prompt_logprobs"]
    assert rows[0] is None
    assert len(rows) == 4
    for token, row in zip(ids[1:], rows[1:], strict=True):
        assert row[str(token)]["logprob"] == -0.5
        assert row[str(token)]["rank"] == 1


def test_token_ids_are_returned(server):
    body = choice(server, max_tokens=4, return_token_ids=True, **GREEDY)
    assert (
        body["prompt_token_ids"] == server.post("/tokenize", {"prompt": "Hello"}).json()["tokens"]
    )
    assert len(body["token_ids"]) == 4


def test_stop_string_and_stop_id(server):
    full = choice(server, max_tokens=24, logit_bias={str(token_of(server, "x")): 100}, **GREEDY)
    assert full["text"] == "x" * 24
    stopped = choice(
        server, max_tokens=24, stop=["xxx"], logit_bias={str(token_of(server, "x")): 100}, **GREEDY
    )
    assert (stopped["text"], stopped["finish_reason"], stopped["stop_reason"]) == (
        "",
        "stop",
        "xxx",
    )
    kept = choice(
        server,
        max_tokens=24,
        stop="xx",
        min_tokens=4,
        include_stop_str_in_output=True,
        logit_bias={str(token_of(server, "x")): 100},
        **GREEDY,
    )
    assert kept["text"] == "x" * 5
    by_id = choice(server, max_tokens=8, return_token_ids=True, **GREEDY)
    last = by_id["token_ids"][5]
    ended = server.complete(max_tokens=8, stop_token_ids=[last], **GREEDY)
    assert ended["choices"][0]["stop_reason"] == last
    assert ended["usage"]["completion_tokens"] == by_id["token_ids"].index(last) + 1
    server.wait_idle()


def test_end_of_sequence(server):
    ended = server.complete(max_tokens=8, temperature=0, logit_bias={"1": 100})
    assert ended["choices"][0]["text"] == ""
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert ended["choices"][0]["stop_reason"] is None
    assert ended["usage"]["completion_tokens"] == 1


def test_truncation_and_unknown_fields(server):
    body = server.complete("Hello there", truncate_prompt_tokens=3, max_tokens=1, no_such=[1])
    assert body["usage"]["prompt_tokens"] == 3


def test_cached_tokens_and_salts(server):
    prompt = "A prompt of its own that fills some blocks: " + "abc" * 30
    first, second = (server.complete(prompt, max_tokens=1) for _ in range(2))
    salted = server.complete(prompt, max_tokens=1, cache_salt="mine")
    cached = [b["usage"]["prompt_tokens_details"]["cached_tokens"] for b in (first, second, salted)]
    assert cached[0] == 0
    assert cached[1] > 100
    assert cached[2] == 0


def test_every_client_gets_its_own_answer(server):
    def ask(i):
        prompt = f"Number {i} of many"
        text = choice(server, prompt, max_tokens=3, echo=True, **GREEDY)["text"]
        assert text.startswith(prompt)
        return text

    alone = [ask(i) for i in range(12)]
    with concurrent.futures.ThreadPoolExecutor(12) as threads:
        assert list(threads.map(ask, range(12))) == alone


def token_of(server, text):
    (token,) = server.post("/tokenize", {"prompt": text}).json()["tokens"]
    return token
