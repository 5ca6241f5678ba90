"""A typed client of the gRPC service.

    with Client("localhost:50051") as client:
        print(client.generate("Hello", max_tokens=8).samples[0].text)
        for chunk in client.stream("Hello", max_tokens=8):
            print(chunk.sample.text, end="")

`AsyncClient` has the same methods, awaited.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from serving.grpc import messages as pb

_FIRST_WAIT = 0.1
_LONGEST_WAIT = 5.0


class RequestError(Exception):
    """A call that failed.

    Attributes:
      code: the gRPC status: INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNAVAILABLE, ...
    """

    def __init__(self, code: grpc.StatusCode, message: str):
        self.code = code
        super().__init__(f"{code.name}: {message}")


class _Methods:
    """Channels' methods by name, and requests from plain values."""

    def __init__(self, channel: Any, api_key: str | None):
        self._channel = channel
        self.metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._methods: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._methods:
            service, _, method_name = name.partition("/")
            method = pb.DESCRIPTOR.services_by_name[service].methods_by_name[method_name]
            make = self._channel.unary_unary
            if method.server_streaming:
                make = self._channel.unary_stream
            self._methods[name] = make(
                f"/{method.containing_service.full_name}/{method.name}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=getattr(pb, method.output_type.name).FromString,
            )
        return self._methods[name]


def make_prompt(prompt: str | Sequence[int]) -> Any:
    """A Prompt of text or token ids."""
    if isinstance(prompt, str):
        return pb.Prompt(text=prompt)
    return pb.Prompt(token_ids=pb.TokenIds(ids=prompt))


def make_request(
    prompt: str | Sequence[int],
    *,
    request_id: str = "",
    priority: int = 0,
    cache_salt: str | None = None,
    choice: Sequence[str] | None = None,
    **sampling: Any,
) -> Any:
    """A GenerateRequest; `sampling` are fields of SamplingParams in jaxllm.proto.

    Raises:
      ValueError: there is no such field, or the value does not fit it.
    """
    params = pb.SamplingParams(**sampling)
    if choice is not None:
        params.choice.values.extend(choice)
    request = pb.GenerateRequest(
        request_id=request_id,
        prompt=make_prompt(prompt),
        sampling_params=params,
        priority=priority,
    )
    if cache_salt is not None:
        request.cache_salt = cache_salt
    return request


class Client:
    """A blocking client; threads may share it.

    Args:
      address: host:port.
      timeout: seconds a call may take, None for no limit.
      retries: how often a call is repeated while the server is UNAVAILABLE and has not answered.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        timeout: float | None = 600.0,
        retries: int = 3,
    ):
        self._channel = grpc.insecure_channel(address)
        self._methods = _Methods(self._channel, api_key)
        self._timeout = timeout
        self._retries = retries

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Any:
        """A GenerateResponse; `options` are those of `make_request`. RequestError if it fails."""
        return self._call("Inference/Generate", make_request(prompt, **options))

    def stream(self, prompt: str | Sequence[int], **options: Any) -> Iterator[Any]:
        """GenerateChunks as they come; closing the iterator ends the request."""
        request = make_request(prompt, **options)
        call = None
        for attempt in range(self._retries + 1):
            answered = False
            call = self._methods["Inference/GenerateStream"](
                request, timeout=self._timeout, metadata=self._methods.metadata
            )
            try:
                for chunk in call:
                    answered = True
                    yield chunk
                return
            except grpc.RpcError as error:
                if answered or not _may_retry(error, attempt, self._retries):
                    raise _as_request_error(error) from None
                time.sleep(_wait(attempt))
            finally:
                call.cancel()

    def score(self, prompt: str | Sequence[int], continuation: str | Sequence[int]) -> Any:
        """A ScoreResponse: log probabilities of the continuation's tokens."""
        request = pb.ScoreRequest(
            prompt=make_prompt(prompt), continuation=make_prompt(continuation)
        )
        return self._call("Inference/Score", request)

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        request = pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        return list(self._call("Inference/Tokenize", request).ids)

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._call("Inference/Detokenize", pb.TokenIds(ids=ids)).text)

    def abort(self, request_ids: Sequence[str]) -> int:
        """How many of these requests there were; they are ended."""
        return int(self._call("Control/Abort", pb.AbortRequest(request_ids=request_ids)).aborted)

    def pause(self) -> None:
        self._call("Control/Pause", pb.Empty())

    def resume(self) -> None:
        self._call("Control/Resume", pb.Empty())

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        request = pb.ResetPrefixCacheRequest(preempt_running=preempt_running)
        return bool(self._call("Control/ResetPrefixCache", request).done)

    def server_info(self) -> Any:
        return self._call("Control/GetServerInfo", pb.Empty())

    def model_info(self) -> Any:
        return self._call("Control/GetModelInfo", pb.Empty())

    def _call(self, name: str, request: Any) -> Any:
        for attempt in range(self._retries + 1):
            try:
                return self._methods[name](
                    request, timeout=self._timeout, metadata=self._methods.metadata
                )
            except grpc.RpcError as error:
                if not _may_retry(error, attempt, self._retries):
                    raise _as_request_error(error) from None
            time.sleep(_wait(attempt))
        raise RequestError(grpc.StatusCode.UNAVAILABLE, "no attempt was made")


class AsyncClient:
    """The client for asyncio; arguments are those of `Client`."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        timeout: float | None = 600.0,
        retries: int = 3,
    ):
        self._channel = grpc.aio.insecure_channel(address)
        self._methods = _Methods(self._channel, api_key)
        self._timeout = timeout
        self._retries = retries

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._channel.close()

    async def generate(self, prompt: str | Sequence[int], **options: Any) -> Any:
        """A GenerateResponse; `options` are those of `make_request`. RequestError if it fails."""
        return await self.call("Inference/Generate", make_request(prompt, **options))

    async def stream(self, prompt: str | Sequence[int], **options: Any) -> AsyncIterator[Any]:
        """GenerateChunks as they come; leaving the loop ends the request."""
        call = self._methods["Inference/GenerateStream"](
            make_request(prompt, **options),
            timeout=self._timeout,
            metadata=self._methods.metadata,
        )
        try:
            async for chunk in call:
                yield chunk
        except grpc.RpcError as error:
            raise _as_request_error(error) from None
        finally:
            call.cancel()

    async def call(self, name: str, request: Any) -> Any:
        """Any method by "Service/Method", with a message of `serving.grpc.messages`."""
        for attempt in range(self._retries + 1):
            try:
                return await self._methods[name](
                    request, timeout=self._timeout, metadata=self._methods.metadata
                )
            except grpc.RpcError as error:
                if not _may_retry(error, attempt, self._retries):
                    raise _as_request_error(error) from None
            await asyncio.sleep(_wait(attempt))
        raise RequestError(grpc.StatusCode.UNAVAILABLE, "no attempt was made")


def _may_retry(error: Any, attempt: int, retries: int) -> bool:
    return error.code() is grpc.StatusCode.UNAVAILABLE and attempt < retries


def _as_request_error(error: Any) -> RequestError:
    return RequestError(error.code(), error.details() or "")


def _wait(attempt: int) -> float:
    """Seconds before the next attempt: doubled each time, and spread."""
    return min(_LONGEST_WAIT, _FIRST_WAIT * 2**attempt) * random.uniform(0.5, 1.5)


__all__ = ["AsyncClient", "Client", "RequestError", "make_request"]
