"""POST /v1/responses, without a memory: one answer of items, whole or as events."""

import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from serving.errors import ServingError
from serving.http.answer import reply
from serving.http.body import decode_body
from serving.http.chat import ChatAnswer
from serving.http.chat_prompt import make_jobs
from serving.http.context import ServerContext
from serving.http.errors import as_api_error, error_body
from serving.http.json_response import encode
from serving.http.responses_protocol import ResponsesRequest, as_chat
from serving.sequence_stream import Delta
from serving.tools.pieces import Content, Piece, Reasoning, ToolArguments, ToolStart

type Event = dict[str, Any]


class Items:
    """The items of an answer as they grow; every change is an event.

    Attributes:
      output: the items so far.
    """

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None

    def feed(self, pieces: Iterable[Piece]) -> Iterator[Event]:
        """Takes new pieces of the text."""
        for piece in pieces:
            match piece:
                case Content(text):
                    yield from self._text("message", text)
                case Reasoning(text):
                    yield from self._text("reasoning", text)
                case ToolStart(_, name):
                    yield from self._begin(
                        {
                            "type": "function_call",
                            "id": f"fc_{secrets.token_hex(12)}",
                            "call_id": f"call_{secrets.token_hex(12)}",
                            "name": name,
                            "arguments": "",
                            "status": "in_progress",
                        }
                    )
                case ToolArguments(_, text):
                    if self._open is not None:
                        self._open["arguments"] += text
                        yield self._event("response.function_call_arguments.delta", delta=text)

    def finish(self, status: str) -> Iterator[Event]:
        """Ends the item that is open; an answer of no text at all is an empty message."""
        if not self.output:
            yield from self._text("message", "")
        yield from self._end(status)

    def _text(self, kind: str, text: str) -> Iterator[Event]:
        if self._open is None or self._open["type"] != kind:
            yield from self._begin(_text_item(kind))
            part = {"output_index": len(self.output) - 1, "content_index": 0}
            if kind == "message":
                yield self._event("response.content_part.added", part=_part(""), **part)
        if self._open is not None and text:
            self._open["content"][0]["text"] += text
            name = "output_text" if kind == "message" else "reasoning_text"
            yield self._event(f"response.{name}.delta", delta=text, content_index=0)

    def _begin(self, item: dict[str, Any]) -> Iterator[Event]:
        yield from self._end("completed")
        self._open = item
        self.output.append(item)
        bare = {**item, "content": []} if item["type"] == "message" else dict(item)
        yield self._event("response.output_item.added", item=bare)

    def _end(self, status: str) -> Iterator[Event]:
        item = self._open
        if item is None:
            return
        item["status"] = status
        if item["type"] == "function_call":
            arguments = item["arguments"]
            yield self._event("response.function_call_arguments.done", arguments=arguments)
        else:
            text = item["content"][0]["text"]
            name = "output_text" if item["type"] == "message" else "reasoning_text"
            yield self._event(f"response.{name}.done", text=text, content_index=0)
            if item["type"] == "message":
                yield self._event("response.content_part.done", part=_part(text), content_index=0)
        yield self._event("response.output_item.done", item=item)
        self._open = None

    def _event(self, name: str, **fields: Any) -> Event:
        item = self.output[-1] if self.output else {}
        place: dict[str, Any] = {"output_index": len(self.output) - 1}
        if not name.startswith("response.output_item"):
            place["item_id"] = item.get("id")
        return {"type": name, **place, **fields}


class _Answer:
    """One request and its answer."""

    def __init__(self, body: ResponsesRequest, chat: ChatAnswer, answer_id: str, model: str):
        self.stream = chat.stream
        self._chat = chat
        self._items = Items()
        self._reason: str | None = None
        self._head = {
            "id": answer_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "temperature": chat.prompt.job.params.temperature,
            "top_p": chat.prompt.job.params.top_p,
            "tool_choice": body.tool_choice or ("auto" if body.tools else "none"),
            "tools": body.tools or [],
            "truncation": "disabled",
            "store": False,
            "background": False,
        }

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        async for _ in self._changes():
            pass
        return self._response(self._status())

    async def events(self) -> AsyncGenerator[bytes]:
        """The answer as events, numbered from 0."""
        number = 0

        def written(event: Event) -> bytes:
            nonlocal number
            data = encode({**event, "sequence_number": number})
            number += 1
            return b"event: " + event["type"].encode() + b"\ndata: " + data + b"\n\n"

        try:
            begun = self._response("in_progress")
            first = b"".join(
                written({"type": f"response.{name}", "response": begun})
                for name in ("created", "in_progress")
            )
            async for changes in self._changes():
                data = first + b"".join(written(event) for event in changes)
                first = b""
                if data:
                    yield data
            status = self._status()
            yield written({"type": f"response.{status}", "response": self._response(status)})
        except ServingError as error:
            told = error_body(as_api_error(error))["error"]
            yield written({**told, "type": "error"})

    async def _changes(self) -> AsyncGenerator[list[Event]]:
        choice = self._chat.choices[0]
        try:
            async for news in self._chat.stream:
                events: list[Event] = []
                for _, delta in news:
                    events += self._items.feed(self._take(choice, delta))
                    if delta.finish_reason is not None:
                        self._reason = delta.finish_reason
                        events += self._items.finish(self._status())
                yield events
        finally:
            self._chat.stream.close()

    def _take(self, choice: Any, delta: Delta) -> list[Piece]:
        self._chat.usage.completion_tokens += len(delta.token_ids)
        return self._chat.pieces(choice, delta)

    def _num_reasoning_tokens(self) -> int:
        """Of the thoughts' text: tokens at the borders may belong to two items."""
        tokenizer = self._chat.context.llm.tokenizer
        thoughts = [item for item in self._items.output if item["type"] == "reasoning"]
        if tokenizer is None:
            return 0
        return sum(len(tokenizer.encode(item["content"][0]["text"], False)) for item in thoughts)

    def _status(self) -> str:
        return "completed" if self._reason == "stop" else "incomplete"

    def _response(self, status: str) -> dict[str, Any]:
        usage = None
        details = None
        if status == "incomplete":
            reason = "max_output_tokens" if self._reason == "length" else self._reason
            details = {"reason": reason}
        if status != "in_progress":
            counted = self._chat.usage
            cached = self._chat.prompt.num_cached_tokens or 0
            usage = {
                "input_tokens": counted.prompt_tokens,
                "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
                "output_tokens": counted.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens()},
                "total_tokens": counted.prompt_tokens + counted.completion_tokens,
            }
        return {
            **self._head,
            "status": status,
            "output": self._items.output if usage is not None else [],
            "usage": usage,
            "error": None,
            "incomplete_details": details,
        }


def responses_route(context: ServerContext) -> Any:
    """The endpoint."""

    async def endpoint(request: Request) -> ASGIApp:
        body = await decode_body(request, ResponsesRequest, context.settings.max_body_size)
        model = context.check_model(body.model)
        answer_id = context.request_id(request, body.request_id, "resp")
        chat_body = as_chat(body)
        jobs = await make_jobs(context, request, chat_body)
        stream = context.llm.submit(jobs, answer_id)
        chat = ChatAnswer(context, chat_body, stream, answer_id, model, "response")
        answer = _Answer(body, chat, answer_id, model)
        return await reply(request, context, answer, streamed=bool(body.stream))

    return endpoint


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _text_item(kind: str) -> dict[str, Any]:
    if kind == "message":
        return {
            "type": "message",
            "id": f"msg_{secrets.token_hex(12)}",
            "role": "assistant",
            "status": "in_progress",
            "content": [_part("")],
        }
    return {
        "type": "reasoning",
        "id": f"rs_{secrets.token_hex(12)}",
        "status": "in_progress",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": ""}],
    }
