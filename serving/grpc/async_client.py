"""The client of the gRPC service for asyncio. Users import it from `jaxllm.client`."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from serving.grpc import messages as pb
from serving.grpc.channel import Methods, as_request_error, seconds_to_wait
from serving.grpc.requests import (
    PromptValue,
    Running,
    make_request,
    make_score_request,
    make_sleep_request,
    weights_messages,
)


class AsyncClient:
    """The methods and arguments of `Client`, awaited."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        timeout: float | None = 600.0,
        retries: int = 3,
    ):
        self._channel = grpc.aio.insecure_channel(address)
        self._methods = Methods(self._channel, api_key)
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
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def generate(self, prompt: PromptValue, **options: Any) -> pb.GenerateResponse:
        """The whole answer; `options` are those of `make_request`."""
        response: pb.GenerateResponse = await self.call(
            "Inference/Generate", make_request(prompt, **options)
        )
        return response

    async def stream(self, prompt: PromptValue, **options: Any) -> AsyncIterator[pb.GenerateChunk]:
        """Chunks as they come; leaving the loop and closing the iterator ends the request."""
        request = make_request(prompt, **options)
        for attempt in range(self._retries + 1):
            answered = False
            call = self._methods["Inference/GenerateStream"](
                request, timeout=self._timeout, metadata=self._methods.metadata
            )
            try:
                async for chunk in call:
                    answered = True
                    yield chunk
                return
            except grpc.RpcError as error:
                if answered:
                    raise as_request_error(error) from None
                wait = seconds_to_wait(error, attempt, self._retries)
            finally:
                call.cancel()
            await asyncio.sleep(wait)

    async def score(self, prompt: PromptValue, continuation: PromptValue) -> pb.ScoreResponse:
        """Log probabilities of the continuation's tokens."""
        request = make_score_request(prompt, continuation)
        response: pb.ScoreResponse = await self.call("Inference/Score", request)
        return response

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        request = pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        return list((await self.call("Inference/Tokenize", request)).ids)

    async def detokenize(self, ids: Sequence[int]) -> str:
        return str((await self.call("Inference/Detokenize", pb.TokenIds(ids=ids))).text)

    async def abort(self, request_ids: Sequence[str]) -> int:
        """How many of these requests there were; they are ended."""
        request = pb.AbortRequest(request_ids=request_ids)
        return int((await self.call("Control/Abort", request)).aborted)

    async def pause(self) -> None:
        await self.call("Control/Pause", pb.Empty())

    async def resume(self) -> None:
        await self.call("Control/Resume", pb.Empty())

    async def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        request = pb.ResetPrefixCacheRequest(preempt_running=preempt_running)
        return bool((await self.call("Control/ResetPrefixCache", request)).done)

    async def sleep(self, level: int = 1, *, running: Running = "refuse") -> None:
        """Gives the server's device memory back; see `LLM.sleep`."""
        await self.call("Control/Sleep", make_sleep_request(level, running))

    async def wake_up(self, tags: Sequence[str] = ()) -> None:
        """Tags are "weights" and "kv_cache", none stands for both; see `LLM.wake_up`."""
        await self.call("Control/WakeUp", pb.WakeUpRequest(tags=tags))

    async def update_weights(
        self,
        weights: Mapping[str, Any] | None = None,
        *,
        path: str | None = None,
        version: str = "",
        running: Running = "refuse",
    ) -> pb.UpdateWeightsResponse:
        """Puts new weights in place; see `LLM.update_weights`.

        Args:
          weights: arrays by the checkpoint's names, sent one after the other.
          path: or a checkpoint in the server's folder for weights.
          version: told by `server_info` from then on.
        """
        response: pb.UpdateWeightsResponse = await self.call(
            "Control/UpdateWeights",
            lambda: weights_messages(weights, path, version, running),
        )
        return response

    async def server_info(self) -> pb.ServerInfo:
        response: pb.ServerInfo = await self.call("Control/GetServerInfo", pb.Empty())
        return response

    async def model_info(self) -> pb.ModelInfo:
        response: pb.ModelInfo = await self.call("Control/GetModelInfo", pb.Empty())
        return response

    async def call(self, name: str, request: Any) -> Any:
        """Any method by "Service/Method".

        Args:
          request: a message, or for a method that takes many a function that makes the iterator of
            one attempt.
        """
        attempt = 0
        while True:
            sent = request() if callable(request) else request
            try:
                return await self._methods[name](
                    sent, timeout=self._timeout, metadata=self._methods.metadata
                )
            except grpc.RpcError as error:
                wait = seconds_to_wait(error, attempt, self._retries)
            attempt += 1
            await asyncio.sleep(wait)
