"""The body of POST /v1/responses, and the chat request that says the same."""

from typing import Any

import msgspec

from serving.http.errors import bad_request
from serving.http.protocol import (
    ChatRequest,
    FunctionDefinition,
    Int32,
    Int64,
    NamedFunction,
    NamedTool,
    Tool,
)


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """POST /v1/responses. Answers are not kept, so none can be referred to."""

    input: str | list[dict[str, Any]] | None = None
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    stream_interval: Int32 | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    truncation: str | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    priority: Int64 | None = None
    request_id: str | None = None
    cache_salt: str | None = None


# Fields that mean in a chat what they mean here.
_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "parallel_tool_calls", "stream"),
    *("stream_interval", "priority", "request_id", "cache_salt", "model", "user"),
)
_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """The chat request with the same meaning.

    Raises:
      ApiError: a field asks for what is not served, or an item of the input is not understood.
    """
    for name in ("background", "previous_response_id", "conversation", "prompt"):
        if getattr(body, name):
            raise bad_request("answers are not kept here", name)
    if body.truncation not in (None, "disabled"):
        raise bad_request("only 'disabled' is supported", "truncation")
    return ChatRequest(
        messages=_messages(body),
        max_completion_tokens=body.max_output_tokens,
        tools=None if body.tools is None else [_tool(tool) for tool in body.tools],
        tool_choice=_tool_choice(body.tool_choice),
        response_format=_format(body.text),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        **{name: getattr(body, name) for name in _SAME},
    )


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    if not body.input:
        raise bad_request("an input is needed", "input")
    for item in body.input:
        match item.get("type", "message"):
            case "message":
                role = "system" if item.get("role") == "developer" else item.get("role")
                messages.append({"role": role, "content": _content(item.get("content"))})
            case "function_call":
                call = {name: item.get(name) for name in ("name", "arguments")}
                called = {"id": item.get("call_id"), "type": "function", "function": call}
                last = messages[-1] if messages else {}
                if last.get("tool_calls"):
                    last["tool_calls"].append(called)
                else:
                    messages.append({"role": "assistant", "content": None, "tool_calls": [called]})
            case "function_call_output":
                output = _content(item.get("output"))
                message = {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
                messages.append(message)
            case "reasoning":
                # Templates leave the thoughts of earlier turns out.
                continue
            case kind:
                raise bad_request(f"items of type {kind!r} are not supported", "input")
    return messages


def _content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS:
            raise bad_request("only parts of text are supported", "input")
        parts.append({"type": "text", "text": part.get("text")})
    return parts


def _tool(tool: dict[str, Any]) -> Tool:
    if tool.get("type") != "function":
        raise bad_request("tools must be of type function", "tools")
    try:
        function = msgspec.convert({**tool, "type": None}, FunctionDefinition)
    except msgspec.ValidationError as error:
        raise bad_request(str(error), "tools") from None
    return Tool(type="function", function=function)


def _tool_choice(choice: str | dict[str, Any] | None) -> str | NamedTool | None:
    if not isinstance(choice, dict):
        return choice
    name = choice.get("name")
    if choice.get("type") != "function" or not isinstance(name, str):
        raise bad_request("none, auto, required, or one function", "tool_choice")
    return NamedTool(function=NamedFunction(name=name))


def _format(text: TextOptions | None) -> dict[str, Any] | None:
    if text is None or text.format is None:
        return None
    if text.format.get("type") == "json_schema":
        schema = {key: value for key, value in text.format.items() if key != "type"}
        return {"type": "json_schema", "json_schema": schema}
    return text.format
