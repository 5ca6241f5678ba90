"""What every route of a server needs."""

import dataclasses
import secrets
import time
from typing import Any

from starlette.requests import Request

from serving.async_llm import AsyncLLM
from serving.generation import GenerationStream
from serving.http.errors import ApiError, bad_request
from serving.http.protocol import SamplingFields
from serving.http.settings import ServeConfig
from serving.tenants import tenant_salt
from serving.tracing import Tracing


@dataclasses.dataclass(slots=True)
class ServerContext:
    """One server.

    Attributes:
      names: in the API; the first one stands in answers.
      chat_template: overrides the tokenizer's, None for that one.
      tool_parser: name of the parser of tool calls, None where none fits the model.
      server_load: requests to generating routes that are open now.
      tracing: makes a span of each request, None where none is wanted.
    """

    llm: AsyncLLM
    settings: ServeConfig
    names: tuple[str, ...]
    isolate_keys: bool = False
    chat_template: str | None = None
    tool_parser: str | None = None
    server_load: int = 0
    tracing: Tracing | None = None
    started: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def check_model(self, model: str | None) -> str:
        """The name to answer under; 404 for a model that is not served."""
        if model is None or model == "":
            return self.names[0]
        if model not in self.names:
            raise ApiError(
                404, f"model {model!r} is not served; served: {', '.join(self.names)}", "model"
            )
        return model

    def request_id(self, request: Request, given: str | None, prefix: str) -> str:
        """The id of an answer, from the body, the header X-Request-Id, or made up."""
        own = given or request.headers.get("x-request-id")
        if own is not None and not (own.isascii() and own.isprintable() and len(own) <= 128):
            raise bad_request("X-Request-Id: at most 128 printable characters")
        return f"{prefix}-{own or secrets.token_hex(16)}"

    def cache_salt(self, request: Request, given: str | None) -> str | None:
        """The salt of the prefix cache: the request's, and the API key's where they are apart."""
        key = request.scope.get("api_key")
        if not self.isolate_keys or key is None:
            return given
        return tenant_salt(key, given)


class Usage:
    """Tokens of one request, as they come."""

    def __init__(self, context: ServerContext, stream: GenerationStream):
        self._stream = stream
        self._details = context.settings.enable_prompt_tokens_details
        self.prompt_tokens = sum(len(p.job.prompt.token_ids) for p in stream.prompts)
        self.completion_tokens = 0

    def render(self) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        if self._details:
            cached = sum(p.num_cached_tokens or 0 for p in self._stream.prompts)
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return usage


def usage_wishes(context: ServerContext, request: SamplingFields) -> tuple[bool, bool]:
    """(usage at the end of a stream, usage on each of its pieces)."""
    options = request.stream_options
    forced = context.settings.enable_force_include_usage
    include = forced or bool(options is not None and options.include_usage)
    return include, include and bool(options is not None and options.continuous_usage_stats)
