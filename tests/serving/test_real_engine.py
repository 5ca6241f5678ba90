"""The server with the real engine on a tiny random model."""

import concurrent.futures

import pytest

from tests.serving.conftest import running_server

GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def real(model_folder):
    flags = [
        "--max-num-seqs=4",
        "--max-num-batched-tokens=32",
        "--enforce-eager",
        "--attention-backend=xla",
        "--served-model-name=tiny",
    ]
    # The first start compiles.
    with running_server(
        model_folder, *flags, module="serving.commands", ready_seconds=300
    ) as running:
        yield running


@pytest.mark.slow
def test_it_answers_alone_as_in_company(real):
    prompts = ["Hello", "the an in er", "x" * 70]
    fields = {"max_tokens": 8, "logprobs": 2, "return_token_ids": True, **GREEDY}
    alone = [real.complete(prompt, **fields)["choices"][0] for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        together = list(threads.map(lambda p: real.complete(p, **fields)["choices"][0], prompts))
    for one, other in zip(alone, together, strict=True):
        assert one["token_ids"] == other["token_ids"]
        assert one["text"] == other["text"]
        assert len(one["logprobs"]["tokens"]) == 8
        tops = one["logprobs"]["top_logprobs"]
        for value, top in zip(one["logprobs"]["token_logprobs"], tops, strict=True):
            assert value == max(top.values())
    chunks = real.stream("/v1/completions", {"prompt": "Hello", "max_tokens": 8, **GREEDY})
    assert "".join(c["choices"][0]["text"] for c in chunks) == alone[0]["text"]
    real.wait_idle()


@pytest.mark.slow
def test_structured_outputs_and_words(real):
    body = real.complete(max_tokens=8, temperature=0, structured_outputs={"choice": ["red fox"]})
    assert body["choices"][0]["text"] == "red fox"
    assert body["choices"][0]["finish_reason"] == "stop"
    wrong = real.post("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "("}})
    assert wrong.status_code == 400
    tool = {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"properties": {"a": {"enum": ["b"]}}, "required": ["a"]},
        },
    }
    named = {"type": "function", "function": {"name": "f"}}
    choice = real.chat(tools=[tool], tool_choice=named, max_tokens=60)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "f"
    assert '"a"' in call["function"]["arguments"]
