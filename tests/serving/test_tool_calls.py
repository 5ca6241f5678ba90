"""Tool calls over HTTP, streamed and not; the official client."""

import json

import openai
import pytest

from tests.serving.conftest import running_server

CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris", "n": [1, 2]}}</tool_call>'
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def scripted(model_folder):
    text = f"<think>The city</think>I look. {CALL}"
    with running_server(model_folder, "--reasoning-parser=qwen3", stub={"script": text}) as running:
        yield running


@pytest.fixture(scope="module")
def client(scripted):
    return openai.OpenAI(base_url=scripted.url + "/v1", api_key="none", max_retries=0, timeout=30)


def test_a_call_whole_and_streamed(client):
    asked = {
        "model": client.models.list().data[0].id,
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [TOOL],
        "temperature": 0,
    }
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content == "I look."
    assert whole.message.reasoning_content == "The city"
    (call,) = whole.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris", "n": [1, 2]}
    content, reasoning, name, arguments, finishes = "", "", "", "", []
    for chunk in client.chat.completions.create(stream=True, **asked):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", None) or ""
        for part in delta.tool_calls or []:
            assert part.index == 0
            name += part.function.name or ""
            arguments += part.function.arguments or ""
        if chunk.choices[0].finish_reason:
            finishes.append(chunk.choices[0].finish_reason)
    assert (content, reasoning, name) == ("I look.", "The city", "get_weather")
    assert arguments == call.function.arguments
    assert finishes == ["tool_calls"]


def test_a_call_that_is_cut_says_length(scripted):
    body = scripted.chat(tools=[TOOL], max_tokens=70)
    assert body["choices"][0]["finish_reason"] == "length"


def test_tools_that_are_not_to_be_used(scripted):
    choice = scripted.chat(tools=[TOOL], tool_choice="none")["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == f"I look. {CALL}"
    assert "tool_calls" not in choice["message"]


def test_reasoning_can_be_left_out(scripted):
    message = scripted.chat(include_reasoning=False)["choices"][0]["message"]
    assert "reasoning_content" not in message


def test_the_official_client_reads_answers_and_errors(client, scripted):
    out = client.completions.create(
        model=client.models.list().data[0].id,
        prompt="Hi",
        max_tokens=4,
        logprobs=2,
        extra_body={"ignore_eos": True, "top_k": 5},
    )
    assert out.usage.completion_tokens == 4
    assert len(out.choices[0].logprobs.tokens) == 4
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="", prompt="x", temperature=-1)
    assert caught.value.body["param"] == "temperature"
