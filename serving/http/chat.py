"""POST /v1/chat/completions."""

import dataclasses
import secrets
import string
from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from serving.generation import GenerationStream, Job
from serving.http.answer import ChunkedAnswer, reply
from serving.http.body import decode_body
from serving.http.chat_prompt import make_jobs, parser_for
from serving.http.context import ServerContext
from serving.http.logprobs import LogprobWriter, prompt_logprobs
from serving.http.protocol import ChatRequest, NamedTool
from serving.sequence_stream import Delta
from serving.tools.pieces import Content, Piece, Reasoning, TextParser, ToolArguments, ToolStart

_ID_CHARACTERS = string.ascii_letters + string.digits


@dataclasses.dataclass(slots=True)
class _Choice:
    """One choice on its way.

    Attributes:
      has_calls: a tool call has begun.
      held: news that is not sent yet.
    """

    index: int
    parser: TextParser
    logprobs: LogprobWriter | None
    has_calls: bool = False
    began: bool = False
    held: Delta = dataclasses.field(default_factory=Delta)


class ChatAnswer(ChunkedAnswer):
    """One request: its choices, and how they are written."""

    def __init__(
        self,
        context: ServerContext,
        body: ChatRequest,
        stream: GenerationStream,
        answer_id: str,
        model: str,
        object_name: str,
    ):
        super().__init__(context, body, stream, answer_id, model, object_name)
        self.is_plain = self.is_plain and not body.logprobs
        self.body = body
        self.prompt = stream.prompts[0]
        ids = self.prompt.job.prompt.token_ids
        self.choices = []
        for index in range(self.prompt.job.params.n):
            writer = None
            if body.logprobs:
                writer = LogprobWriter(
                    context.llm.tokenizer,
                    ids,
                    body.top_logprobs or 0,
                    bool(body.return_tokens_as_token_ids),
                )
            self.choices.append(_Choice(index, parser_for(context, body, ids), writer))

    def pieces(self, choice: _Choice, delta: Delta) -> list[Piece]:
        """What new text consists of."""
        found = list(choice.parser.feed(delta.text)) if delta.text else []
        if delta.finish_reason is not None:
            found += choice.parser.finish()
        if self.body.include_reasoning is False:
            found = [piece for piece in found if not isinstance(piece, Reasoning)]
        choice.has_calls = choice.has_calls or any(isinstance(p, ToolStart) for p in found)
        return found

    def finish_reason(self, choice: _Choice, reason: str | None) -> str | None:
        """`tool_calls` takes the place of `stop`, not of `length`; a named tool was no choice."""
        named = isinstance(self.body.tool_choice, NamedTool)
        return "tool_calls" if reason == "stop" and choice.has_calls and not named else reason

    def extras(self, choice: _Choice, delta: Delta) -> dict[str, Any]:
        """The fields of a choice that are alike in pieces and in whole answers."""
        self.usage.completion_tokens += len(delta.token_ids)
        logprobs = None
        if choice.logprobs is not None and delta.logprobs:
            logprobs = choice.logprobs.chat(delta.logprobs, delta.token_ids)
        fields: dict[str, Any] = {
            "logprobs": logprobs,
            "finish_reason": self.finish_reason(choice, delta.finish_reason),
            "stop_reason": delta.stop_reason,
        }
        if self.body.return_token_ids:
            fields["token_ids"] = delta.token_ids
        return fields

    def message(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        """A whole message."""
        content, reasoning = "", ""
        calls: list[dict[str, Any]] = []
        for piece in pieces:
            match piece:
                case Content(text):
                    content += text
                case Reasoning(text):
                    reasoning += text
                case ToolStart(_, name):
                    calls.append(self._call(name))
                case ToolArguments(index, text):
                    calls[index]["function"]["arguments"] += text
        message: dict[str, Any] = {
            "role": self.context.settings.response_role,
            "content": content if content or not (calls or reasoning) else None,
            "refusal": None,
        }
        if self.body.echo:
            message["content"] = self._last_text() + (message["content"] or "")
        if reasoning:
            message["reasoning"] = message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        deltas = await self.deltas(len(self.choices))
        choices = []
        for choice, delta in zip(self.choices, deltas, strict=True):
            message = self.message(self.pieces(choice, delta))
            choices.append(
                {"index": choice.index, "message": message, **self.extras(choice, delta)}
            )
        answer = {**self.head, "choices": choices, "usage": self.usage.render()}
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = self.prompt.job.prompt.token_ids
        if self.body.prompt_logprobs is not None and self.prompt.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(
                self.prompt.prompt_logprobs,
                self.prompt.job.prompt.token_ids,
                self.context.llm.tokenizer,
            )
        return answer

    def chunks(self, index: int, delta: Delta) -> Iterable[dict[str, Any] | bytes]:
        choice = self.choices[index]
        if not choice.began:
            choice.began = True
            role = {"role": self.context.settings.response_role, "content": ""}
            first = self._chunk(choice, role)
            if self.body.return_token_ids:
                first["prompt_token_ids"] = self.prompt.job.prompt.token_ids
            yield first
            if self.body.echo and (text := self._last_text()):
                yield self._chunk(choice, {"content": text})
        pieces = self.pieces(choice, delta)
        if self.is_plain and delta.finish_reason is None and not choice.held.token_ids:
            match pieces:
                case [Content(text)]:
                    yield self.text_chunk(index, text, len(delta.token_ids))
                    return
        deltas = [self._delta(choice, piece) for piece in pieces]
        choice.held.merge(dataclasses.replace(delta, text=""))
        held = choice.held
        wanted = choice.logprobs is not None or self.body.return_token_ids
        if not deltas and not held.finish_reason and not (wanted and held.token_ids):
            return
        choice.held = Delta()
        # All that is not text goes with the last piece.
        for content in deltas[:-1]:
            yield self._chunk(choice, content)
        last = self._chunk(choice, deltas[-1] if deltas else {})
        last["choices"][0].update(self.extras(choice, held))
        yield last

    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        choice = self.choices[index]
        return self._choice(choice, {"content": text}) | self.extras(choice, Delta())

    def _chunk(self, choice: _Choice, delta: dict[str, Any]) -> dict[str, Any]:
        return {**self.head, "choices": [self._choice(choice, delta)]}

    def _choice(self, choice: _Choice, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _delta(self, choice: _Choice, piece: Piece) -> dict[str, Any]:
        match piece:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning": text, "reasoning_content": text}
            case ToolStart(index, name):
                return {"tool_calls": [{"index": index, **self._call(name)}]}
            case ToolArguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _call(self, name: str) -> dict[str, Any]:
        function = {"name": name, "arguments": ""}
        return {"id": self._call_id(), "type": "function", "function": function}

    def _call_id(self) -> str:
        if self.context.tool_parser == "mistral":
            # Mistral's templates demand nine letters and digits.
            return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def _last_text(self) -> str:
        """What `echo` repeats: the text of the last message, if the answer continues it."""
        content = (self.body.messages or [{}])[-1].get("content")
        return content if isinstance(content, str) else ""


def chat_route(context: ServerContext) -> Any:
    """The endpoint."""

    async def endpoint(request: Request) -> ASGIApp:
        body = await decode_body(request, ChatRequest, context.settings.max_body_size)
        model = context.check_model(body.model)
        answer_id = context.request_id(request, body.request_id, "chatcmpl")
        jobs: list[Job] = await make_jobs(context, request, body)
        stream = context.llm.submit(jobs, answer_id)
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        answer = ChatAnswer(context, body, stream, answer_id, model, kind)
        return await reply(request, context, answer, streamed=bool(body.stream))

    return endpoint
