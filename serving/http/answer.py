"""What all generating routes share: answers whole or as events, until the client leaves."""

import abc
import time
from collections.abc import AsyncGenerator, Iterable
from typing import Any, Protocol

from starlette.requests import Request
from starlette.types import ASGIApp

from serving.errors import ServingError
from serving.generation import GenerationStream
from serving.http.context import ServerContext, Usage, usage_wishes
from serving.http.errors import as_api_error, error_body
from serving.http.json_response import JsonResponse, TextTemplate
from serving.http.protocol import SamplingFields
from serving.http.streaming import DONE, EventStream, event, until_disconnect
from serving.sequence_stream import Delta


class Answer(Protocol):
    """An answer on its way."""

    stream: GenerationStream

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""

    def events(self) -> AsyncGenerator[bytes]:
        """The answer as events."""


class ChunkedAnswer(abc.ABC):
    """An Answer of choices, in OpenAI's chunks: what completions and chats share.

    Attributes:
      head: the fields that the answer and all its chunks begin with.
      usage: tokens so far.
    """

    def __init__(
        self,
        context: ServerContext,
        body: SamplingFields,
        stream: GenerationStream,
        answer_id: str,
        model: str,
        object_name: str,
    ):
        self.context = context
        self.stream = stream
        self.usage = Usage(context, stream)
        self.head = {
            "id": answer_id,
            "object": object_name,
            "created": int(time.time()),
            "model": model,
        }
        self._wishes = usage_wishes(context, body)
        self._templates: dict[int, TextTemplate] = {}
        # Pieces that are nothing but text can be made from a template.
        self.is_plain = not self._wishes[1] and not (
            body.return_token_ids or body.prompt_logprobs is not None
        )

    @abc.abstractmethod
    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""

    @abc.abstractmethod
    def chunks(self, index: int, delta: Delta) -> Iterable[dict[str, Any] | bytes]:
        """The chunks that news of a choice makes, some encoded; none where it carries nothing yet.

        Encoded ones only where `is_plain`.
        """

    @abc.abstractmethod
    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        """A choice as a chunk has it, with text and nothing else."""

    def text_chunk(self, index: int, text: str, num_tokens: int) -> bytes:
        """The encoded chunk of a piece that is nothing but text, made of `num_tokens` tokens."""
        self.usage.completion_tokens += num_tokens
        template = self._templates.get(index)
        if template is None:
            choice = self.text_choice(index, TextTemplate.MARK)
            template = self._templates[index] = TextTemplate({**self.head, "choices": [choice]})
        return template.encode(text)

    async def deltas(self, count: int) -> list[Delta]:
        """All the news of each of `count` choices."""
        deltas = [Delta() for _ in range(count)]
        try:
            async for news in self.stream:
                for index, delta in news:
                    deltas[index].merge(delta)
        finally:
            self.stream.close()
        return deltas

    async def events(self) -> AsyncGenerator[bytes]:
        """The answer as events."""
        include, continuous = self._wishes
        try:
            async for news in self.stream:
                out = []
                for index, delta in news:
                    for chunk in self.chunks(index, delta):
                        if isinstance(chunk, bytes):
                            out.append(b"data: %b\n\n" % chunk)
                            continue
                        if continuous:
                            chunk["usage"] = self.usage.render()
                        out.append(event(chunk))
                if out:
                    yield b"".join(out)
            if include:
                yield event({**self.head, "choices": [], "usage": self.usage.render()})
            yield DONE
        except ServingError as error:
            yield event(error_body(as_api_error(error))) + DONE
        finally:
            self.stream.close()


async def reply(
    request: Request, context: ServerContext, answer: Answer, *, streamed: bool
) -> ASGIApp:
    """The response that sends an answer; a client that leaves ends its generation.

    A stream begins with its first news, so that what fails before it gets a status of its own.
    """
    timeout = context.settings.request_timeout
    if not streamed:
        return JsonResponse(await until_disconnect(request, answer.whole(), timeout))
    events = answer.events()
    try:
        await until_disconnect(request, answer.stream.wait(), timeout)
        first = await until_disconnect(request, anext(events), timeout)
    except BaseException:
        answer.stream.close()
        await events.aclose()
        raise
    return EventStream(first, events, timeout=timeout)
