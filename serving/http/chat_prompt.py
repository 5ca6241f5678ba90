"""From a chat request to a prompt, its parameters, and the parser of the answer."""

import asyncio
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from jaxllm.text.chat_template import render_conversation
from serving.generation import Job
from serving.http.body import to_plain
from serving.http.context import ServerContext
from serving.http.errors import bad_request
from serving.http.params import check_request, make_params, stream_interval
from serving.http.protocol import ChatRequest, NamedTool, TokenizeRequest
from serving.tools.parsers import PARSERS, ArrayParser, NamedToolParser
from serving.tools.pieces import PlainText, TextParser
from serving.tools.reasoning import ThinkParser

# Conversations with more characters are rendered in a thread.
_LONG_CHAT = 4096
_MAX_TOOLS = 512


def check_chat(context: ServerContext, body: ChatRequest) -> None:
    """Raises ApiError for a combination of fields that means nothing."""
    check_request(body)
    if not body.messages:
        raise bad_request("at least one message is needed", "messages")
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs", "top_logprobs")
    if body.top_logprobs is not None and body.top_logprobs < 0:
        raise bad_request("must be at least 0", "top_logprobs")
    if body.tools is not None:
        if not body.tools:
            raise bad_request("tools must not be an empty list", "tools")
        if len(body.tools) > _MAX_TOOLS:
            raise bad_request(f"{len(body.tools)} tools; at most {_MAX_TOOLS}", "tools")
        if any(tool.type != "function" for tool in body.tools):
            raise bad_request("tools must be of type function", "tools")
    _check_tool_choice(context, body)


def _check_tool_choice(context: ServerContext, body: ChatRequest) -> None:
    choice = body.tool_choice
    if choice is None:
        choice = "auto" if body.tools else "none"
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise bad_request("none, auto, required, or one function", "tool_choice")
    if choice != "none" and not body.tools:
        raise bad_request("tool_choice needs tools", "tool_choice")
    if isinstance(choice, NamedTool):
        names = [tool.function.name for tool in body.tools or []]
        if choice.function.name not in names:
            raise bad_request(f"{choice.function.name!r} is none of the tools", "tool_choice")
    if choice == "auto" and (
        context.tool_parser is None or not context.settings.enable_auto_tool_choice
    ):
        raise bad_request(
            "this server cannot find tool calls in the answers of this model: start it with "
            f"--tool-call-parser ({', '.join(PARSERS)}) and --enable-auto-tool-choice",
            "tool_choice",
        )


def tools_in_use(body: ChatRequest) -> bool:
    """Whether the answer may hold tool calls."""
    return bool(body.tools) and body.tool_choice != "none"


def parser_for(context: ServerContext, body: ChatRequest, prompt: Sequence[int]) -> TextParser:
    """A parser for the text of one choice."""
    parser: TextParser = PlainText()
    if tools_in_use(body):
        choice = body.tool_choice
        names = frozenset(tool.function.name for tool in body.tools or [])
        if isinstance(choice, NamedTool):
            parser = NamedToolParser(choice.function.name)
        elif choice == "required":
            parser = ArrayParser(names)
        elif context.tool_parser is not None:
            parser = PARSERS[context.tool_parser](names)
    if context.settings.reasoning_parser is not None and not _is_forced(body):
        inside = context.settings.reasoning_parser == "deepseek_r1"
        tokenizer = context.llm.tokenizer
        if tokenizer is not None and not inside:
            end = tokenizer.decode(list(prompt[-8:]), skip_special_tokens=False)
            inside = end.rstrip().endswith("<think>")
        parser = ThinkParser(parser, inside)
    return parser


async def make_jobs(context: ServerContext, request: Request, body: ChatRequest) -> list[Job]:
    """The request as the engine takes it.

    Raises:
      ApiError, ParameterError, TextError: it is not valid.
    """
    check_chat(context, body)
    llm = context.llm
    salt = context.cache_salt(request, body.cache_salt)
    ids = await chat_token_ids(context, body)
    processed = await llm.process_prompt(
        {"prompt_token_ids": ids, "cache_salt": salt},
        truncate_prompt_tokens=body.truncate_prompt_tokens,
    )
    more: dict[str, Any] = {}
    if body.logprobs:
        more["logprobs"] = body.top_logprobs or 0
    if tools_in_use(body):
        if _is_forced(body):
            if body.structured_outputs is not None or body.response_format is not None:
                raise bad_request("a forced tool call has its own grammar", "response_format")
            more["structured_outputs"] = {"json": _forced_schema(body)}
        else:
            # Notations of tool calls are special tokens in some vocabularies.
            more["skip_special_tokens"] = False
    max_tokens = body.max_completion_tokens
    if max_tokens is None:
        max_tokens = body.max_tokens
    params = make_params(
        body,
        llm.description,
        prompt_len=len(processed.token_ids),
        max_tokens=max_tokens,
        **more,
    )
    interval = stream_interval(body, context.settings.stream_interval)
    return [Job(processed, params, body.priority or 0, interval)]


async def chat_token_ids(context: ServerContext, body: ChatRequest | TokenizeRequest) -> list[int]:
    """Token ids of a rendered conversation."""
    messages = body.messages or []
    characters = sum(len(str(message.get("content") or "")) for message in messages)
    if characters > _LONG_CHAT:
        return await asyncio.to_thread(_encode_chat, context, body)
    return _encode_chat(context, body)


def _encode_chat(context: ServerContext, body: ChatRequest | TokenizeRequest) -> list[int]:
    tokenizer = context.llm.tokenizer
    if tokenizer is None:
        raise bad_request("this server has no tokenizer: only token ids are served", "messages")
    if body.chat_template is not None and not context.settings.trust_request_chat_template:
        raise bad_request(
            "templates in requests need --trust-request-chat-template", "chat_template"
        )
    tools = [to_plain(tool) for tool in body.tools] if body.tools else None
    options: dict[str, Any] = {}
    extra = dict(body.chat_template_kwargs or {})
    if isinstance(body, ChatRequest):
        if body.tool_choice == "none":
            tools = None
        if body.reasoning_effort is not None:
            extra.setdefault("reasoning_effort", body.reasoning_effort)
        options["documents"] = body.documents
    text = render_conversation(
        tokenizer,
        body.messages or [],
        chat_template=body.chat_template or context.chat_template,
        tools=tools,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        extra=extra,
        **options,
    )
    most = context.llm.description.max_model_len * tokenizer.max_token_characters
    if len(text) > most:
        raise bad_request(
            f"the conversation has {len(text)} characters, more than "
            f"{context.llm.description.max_model_len} tokens (max_model_len) can hold",
            "messages",
        )
    # The template writes what the model expects around the text.
    return tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))


def _is_forced(body: ChatRequest) -> bool:
    return isinstance(body.tool_choice, NamedTool) or body.tool_choice == "required"


def _forced_schema(body: ChatRequest) -> dict[str, Any]:
    """The JSON schema of the text that a forced call consists of."""
    tools = body.tools or []
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        tool = next(tool for tool in tools if tool.function.name == name)
        return _parameters(tool.function.parameters)
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "enum": [tool.function.name]},
                "parameters": _parameters(tool.function.parameters),
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if body.parallel_tool_calls is False:
        schema["maxItems"] = 1
    return schema


def _parameters(schema: dict[str, Any] | None) -> dict[str, Any]:
    """A schema of arguments, which are an object whatever it says."""
    return {**schema, "type": "object"} if schema else {"type": "object"}
