"""The blocking client of the gRPC service. Users import it from `jaxllm.client`."""

import time
from collections.abc import Iterator, Mapping, Sequence
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


class Client:
    """A blocking client; threads may share it. Every method raises RequestError if a call fails.

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
        self._methods = Methods(self._channel, api_key)
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

    def generate(self, prompt: PromptValue, **options: Any) -> pb.GenerateResponse:
        """The whole answer; `options` are those of `make_request`."""
        response: pb.GenerateResponse = self.call(
            "Inference/Generate", make_request(prompt, **options)
        )
        return response

    def stream(self, prompt: PromptValue, **options: Any) -> Iterator[pb.GenerateChunk]:
        """Chunks as they come; closing the iterator ends the request."""
        request = make_request(prompt, **options)
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
                if answered:
                    raise as_request_error(error) from None
                wait = seconds_to_wait(error, attempt, self._retries)
            finally:
                call.cancel()
            time.sleep(wait)

    def score(self, prompt: PromptValue, continuation: PromptValue) -> pb.ScoreResponse:
        """Log probabilities of the continuation's tokens."""
        request = make_score_request(prompt, continuation)
        response: pb.ScoreResponse = self.call("Inference/Score", request)
        return response

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        request = pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        return list(self.call("Inference/Tokenize", request).ids)

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self.call("Inference/Detokenize", pb.TokenIds(ids=ids)).text)

    def abort(self, request_ids: Sequence[str]) -> int:
        """How many of these requests there were; they are ended."""
        request = pb.AbortRequest(request_ids=request_ids)
        return int(self.call("Control/Abort", request).aborted)

    def pause(self) -> None:
        self.call("Control/Pause", pb.Empty())

    def resume(self) -> None:
        self.call("Control/Resume", pb.Empty())

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        request = pb.ResetPrefixCacheRequest(preempt_running=preempt_running)
        return bool(self.call("Control/ResetPrefixCache", request).done)

    def sleep(self, level: int = 1, *, running: Running = "refuse") -> None:
        """Gives the server's device memory back; see `LLM.sleep`."""
        self.call("Control/Sleep", make_sleep_request(level, running))

    def wake_up(self, tags: Sequence[str] = ()) -> None:
        """Tags are "weights" and "kv_cache", none stands for both; see `LLM.wake_up`."""
        self.call("Control/WakeUp", pb.WakeUpRequest(tags=tags))

    def update_weights(
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
        response: pb.UpdateWeightsResponse = self.call(
            "Control/UpdateWeights",
            lambda: weights_messages(weights, path, version, running),
        )
        return response

    def server_info(self) -> pb.ServerInfo:
        response: pb.ServerInfo = self.call("Control/GetServerInfo", pb.Empty())
        return response

    def model_info(self) -> pb.ModelInfo:
        response: pb.ModelInfo = self.call("Control/GetModelInfo", pb.Empty())
        return response

    def call(self, name: str, request: Any) -> Any:
        """Any method by "Service/Method".

        Args:
          request: a message, or for a method that takes many a function that makes the iterator of
            one attempt.
        """
        attempt = 0
        while True:
            sent = request() if callable(request) else request
            try:
                return self._methods[name](
                    sent, timeout=self._timeout, metadata=self._methods.metadata
                )
            except grpc.RpcError as error:
                wait = seconds_to_wait(error, attempt, self._retries)
            attempt += 1
            time.sleep(wait)
