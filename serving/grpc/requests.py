"""Requests of the gRPC service from plain values, for both clients."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import grpc
import numpy as np

from serving.grpc import messages as pb

type PromptValue = str | Sequence[int]
type Running = Literal["refuse", "abort", "recompute"]

_CHUNK_BYTES = 2**20


class RequestError(Exception):
    """A call that failed.

    Attributes:
      code: the gRPC status: INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNAVAILABLE, ...
    """

    def __init__(self, code: grpc.StatusCode, message: str):
        self.code = code
        super().__init__(f"{code.name}: {message}")


def make_prompt(prompt: PromptValue) -> pb.Prompt:
    """A Prompt of text or token ids."""
    if isinstance(prompt, str):
        return pb.Prompt(text=prompt)
    return pb.Prompt(token_ids=pb.TokenIds(ids=prompt))


def make_request(
    prompt: PromptValue,
    *,
    request_id: str = "",
    priority: int = 0,
    cache_salt: str | None = None,
    choice: Sequence[str] | None = None,
    **sampling: Any,
) -> pb.GenerateRequest:
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


def make_score_request(prompt: PromptValue, continuation: PromptValue) -> pb.ScoreRequest:
    return pb.ScoreRequest(prompt=make_prompt(prompt), continuation=make_prompt(continuation))


def make_sleep_request(level: int, running: Running) -> pb.SleepRequest:
    return pb.SleepRequest(level=level, running=running_value(running))


def running_value(running: Running) -> Any:
    """The enum value of a name.

    Raises:
      ValueError: there is no such name.
    """
    if running.upper() not in pb.Running.keys():  # noqa: SIM118 - an enum is no mapping
        names = ", ".join(name.lower() for name in pb.Running.keys())  # noqa: SIM118
        raise ValueError(f"running={running!r}: one of {names}")
    return pb.Running.Value(running.upper())


def weights_messages(
    weights: Mapping[str, Any] | None, path: str | None, version: str, running: Running
) -> Iterator[pb.UpdateWeightsRequest]:
    """The stream of UpdateWeights: a header, then every array in chunks.

    Raises:
      ValueError: neither or both of `weights` and `path` are given.
    """
    if (weights is None) == (path is None):
        raise ValueError("give either weights or the path of a checkpoint")
    header = pb.WeightsHeader(version=version, running=running_value(running))
    if path is not None:
        header.path = path
    first = iter([pb.UpdateWeightsRequest(header=header)])
    return itertools.chain(first, _chunks(weights or {}))


def _chunks(weights: Mapping[str, Any]) -> Iterator[pb.UpdateWeightsRequest]:
    for name, value in weights.items():
        # One array at a time comes from its device.
        array = np.asarray(value)
        data = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        head = {"name": name, "dtype": array.dtype.name, "shape": array.shape}
        for start in range(0, max(len(data), 1), _CHUNK_BYTES):
            piece = bytes(data[start : start + _CHUNK_BYTES])
            yield pb.UpdateWeightsRequest(chunk=pb.TensorChunk(data=piece, **head))
            head = {}
