"""POST /v1/responses: items, events, tools, and what is not kept."""

import json

import pytest

GREEDY = {"temperature": 0, "ignore_eos": True}
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
PATH = "/v1/responses"


def respond(server, **fields):
    reply = server.post(PATH, {"input": "Hello", **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def events_of(server, **fields):
    found = []
    with server.client.stream(
        "POST", PATH, json={"input": "Hello", "stream": True, **fields}
    ) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    return found


def text_of(body):
    return "".join(
        part["text"]
        for item in body["output"]
        if item["type"] == "message"
        for part in item["content"]
    )


def test_it_answers_as_a_chat(server):
    want = server.chat(max_tokens=12, **GREEDY)
    body = respond(server, max_output_tokens=12, **GREEDY)
    assert body["object"] == "response"
    assert text_of(body) == want["choices"][0]["message"]["content"]
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    usage = body["usage"]
    assert usage["output_tokens"] == 12
    assert usage["input_tokens"] == want["usage"]["prompt_tokens"]
    assert usage["total_tokens"] == usage["input_tokens"] + 12
    ended = respond(
        server, logit_bias=None, stop=[text_of(body)[3:5]], max_output_tokens=12, **GREEDY
    )
    assert ended["status"] == "completed"
    assert ended["incomplete_details"] is None


def test_items_become_messages(server):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"role": "user", "content": "And?"},
    ]
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "A"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "user", "content": "And?"},
    ]
    want = server.chat(messages, max_tokens=10, **GREEDY)
    body = respond(server, input=items, instructions="Be brief", max_output_tokens=10, **GREEDY)
    assert text_of(body) == want["choices"][0]["message"]["content"]
    assert body["usage"]["input_tokens"] == want["usage"]["prompt_tokens"]


def test_events_join_to_the_whole(server):
    fields = {"max_output_tokens": 20, **GREEDY}
    want = respond(server, **fields)
    events = events_of(server, **fields)
    kinds = [event["type"] for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    deltas = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    assert deltas == text_of(want) == text_of(events[-1]["response"])
    assert events[-1]["response"]["usage"] == want["usage"]
    assert events[0]["response"]["output"] == []


def test_a_call_of_a_tool(launch):
    text = 'Let me see.<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    server = launch("--tool-call-parser=hermes", stub={"script": text})
    fields = {"tools": [WEATHER], "max_output_tokens": 200, "temperature": 0}
    body = respond(server, **fields)
    assert [item["type"] for item in body["output"]] == ["message", "function_call"]
    assert body["status"] == "completed"
    call = body["output"][1]
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Rome"})
    events = events_of(server, **fields)
    arguments = [
        e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"
    ]
    assert json.loads("".join(arguments)) == {"city": "Rome"}
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["message", "function_call"]
    assert done[1]["arguments"] == "".join(arguments)


def test_thoughts_are_an_item(launch):
    server = launch("--reasoning-parser=qwen3", stub={"script": "<think>hm hm</think>Yes"})
    body = respond(server, max_output_tokens=100, temperature=0)
    assert [item["type"] for item in body["output"]] == ["reasoning", "message"]
    assert body["output"][0]["content"][0]["text"] == "hm hm"
    assert text_of(body) == "Yes"
    assert 0 < body["usage"]["output_tokens_details"]["reasoning_tokens"] < 25
    events = events_of(server, max_output_tokens=100, temperature=0)
    thought = "".join(e["delta"] for e in events if e["type"] == "response.reasoning_text.delta")
    assert thought == "hm hm"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "image"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, None),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"text": {"format": {"type": "x"}}}, None),
        ({"temperature": 3}, "temperature"),
    ],
)
def test_what_is_refused(server, fields, param):
    reply = server.post(PATH, {"input": "Hello", **fields})
    assert reply.status_code == 400, reply.text
    assert param is None or reply.json()["error"]["param"] == param


def test_the_official_client(server):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    answer = client.responses.create(
        model="tiny", input="Hello", max_output_tokens=8, temperature=0
    )
    with client.responses.stream(
        model="tiny", input="Hello", max_output_tokens=8, temperature=0
    ) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
    assert text == answer.output_text
    client.close()
