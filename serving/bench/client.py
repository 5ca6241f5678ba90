"""One streamed request to an OpenAI server, timed.

aiohttp, because the client shares the machine with the server in most tests: per streamed event it
takes half the processor time of httpx (docs/bench.md).
"""

import asyncio
import dataclasses
import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from jaxllm.errors import ConfigError
from serving.bench.datasets import BenchRequest
from serving.bench.timeline import Timeline

BACKENDS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
_MOST_ERROR_TEXT = 300


class TargetError(ConfigError):
    """The server under test gives no usable answer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Where requests go and what they all carry.

    Attributes:
      base_url: without the endpoint's path.
      backend: a key of BACKENDS.
      endpoint: path of the API.
      headers: sent with every request.
      body: fields of every request, such as sampling parameters.
      insecure: do not check certificates.
    """

    base_url: str
    backend: str
    endpoint: str
    model: str
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    body: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    insecure: bool = False

    def request_body(self, request: BenchRequest) -> dict[str, Any]:
        """The JSON of a request."""
        content: dict[str, Any]
        if self.backend == "openai-chat":
            content = {"messages": [{"role": "user", "content": request.prompt}]}
            content["max_completion_tokens"] = request.output_len
        else:
            content = {"prompt": request.prompt, "max_tokens": request.output_len}
        return {
            "model": self.model,
            **content,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.body,
        }


def new_session(insecure: bool = False) -> aiohttp.ClientSession:
    """A session without limits of its own."""
    connector = aiohttp.TCPConnector(limit=0, ssl=not insecure)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2**20)


def default_headers() -> dict[str, str]:
    """The key in OPENAI_API_KEY, if there is one."""
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


async def send(
    session: aiohttp.ClientSession, target: Target, request: BenchRequest, request_id: str
) -> Timeline:
    """Sends a request and follows its stream; what fails stands in `error`, nothing is raised."""
    timeline = Timeline(prompt_len=request.prompt_len)
    body = json.dumps(target.request_body(request)).encode()
    headers = {"Content-Type": "application/json", **target.headers, "x-request-id": request_id}
    url = target.base_url + target.endpoint
    timeline.start = time.perf_counter()
    try:
        async with session.post(url, data=body, headers=headers) as reply:
            if reply.status != 200:
                text = (await reply.text())[:_MOST_ERROR_TEXT]
                timeline.error = f"{reply.status} {reply.reason}: {text}"
                return timeline
            pieces: list[str] = []
            async for event in _events(reply):
                error = event.get("error")
                if error:
                    timeline.error = f"in the stream: {json.dumps(error)[:_MOST_ERROR_TEXT]}"
                    return timeline
                _note(timeline, event, target.backend, pieces)
            timeline.text = "".join(pieces)
            if not timeline.ttft:
                timeline.error = "the stream had no output"
                return timeline
            timeline.error = ""
            if not timeline.output_len:
                # A server that does not tell usage: a piece is taken for a token.
                timeline.output_len = 1 + len(timeline.itl)
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
        timeline.error = f"{type(error).__name__}: {error}"
    return timeline


async def first_model(
    session: aiohttp.ClientSession, base_url: str, headers: Mapping[str, str], wait: float
) -> tuple[str, str]:
    """Id and root (where the weights came from) of the first model, tried for `wait` seconds.

    Raises:
      TargetError: no server there, or it has no model.
    """
    deadline = time.monotonic() + wait
    while True:
        try:
            async with session.get(f"{base_url}/v1/models", headers=headers) as reply:
                if reply.status == 200:
                    card = (await reply.json())["data"][0]
                    return card["id"], card.get("root") or card["id"]
                error = f"{reply.status} {reply.reason}"
        except (TimeoutError, aiohttp.ClientError, OSError) as failure:
            error = str(failure) or type(failure).__name__
        except (ValueError, LookupError, TypeError):
            raise TargetError(f"{base_url}/v1/models is not OpenAI's list of models") from None
        if time.monotonic() >= deadline:
            raise TargetError(f"{base_url}/v1/models: {error}")
        await asyncio.sleep(0.5)


async def _events(reply: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """JSON of the events of a stream, without comments and the end mark."""
    rest = b""
    async for data in reply.content.iter_any():
        rest += data
        if b"\n" not in data:
            continue
        *lines, rest = rest.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                payload = line[5:].strip()
                if payload != b"[DONE]":
                    yield json.loads(payload)


def _note(timeline: Timeline, event: dict[str, Any], backend: str, pieces: list[str]) -> None:
    usage = event.get("usage")
    if usage:
        timeline.output_len = usage.get("completion_tokens") or 0
        timeline.prompt_len = usage.get("prompt_tokens") or timeline.prompt_len
    choices = event.get("choices")
    if not choices:
        return
    if backend == "openai-chat":
        delta = choices[0].get("delta") or {}
        text = delta.get("content") or ""
        carries = text or any(
            delta.get(name) for name in ("reasoning_content", "reasoning", "tool_calls")
        )
        if not carries and not choices[0].get("finish_reason"):
            # The piece that only tells the role comes before any token.
            return
    else:
        # Text may be empty: of special tokens, or while a character is not whole.
        text = choices[0].get("text") or ""
    timeline.note(time.perf_counter())
    pieces.append(text)
