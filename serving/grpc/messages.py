"""Classes of the messages in jaxllm.proto, made from its compiled description.

A test checks that the description, `jaxllm.binpb`, and the types in `messages.pyi` are current.
They are what this command writes (the types between a head and a line of their own):

    python -m grpc_tools.protoc -I. --descriptor_set_out=serving/grpc/jaxllm.binpb \\
        --pyi_out=. serving/grpc/jaxllm.proto
"""

from importlib import resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal import enum_type_wrapper

FILE = "serving/grpc/jaxllm.proto"


def _load() -> tuple[Any, dict[str, Any]]:
    data = resources.files("serving.grpc").joinpath("jaxllm.binpb").read_bytes()
    described = descriptor_pb2.FileDescriptorSet.FromString(data)
    # The default pool is the one that reflection shows.
    pool = descriptor_pool.Default()
    for file in described.file:
        pool.AddSerializedFile(file.SerializeToString())
    names = [file.name for file in described.file]
    return (
        pool.FindFileByName(FILE),
        message_factory.GetMessageClassesForFiles(names, pool),
    )


DESCRIPTOR, _CLASSES = _load()


def _message(name: str) -> Any:
    return _CLASSES[f"jaxllm.{name}"]


Running = enum_type_wrapper.EnumTypeWrapper(DESCRIPTOR.enum_types_by_name["Running"])
Empty = _message("Empty")
TokenIds = _message("TokenIds")
Prompt = _message("Prompt")
Strings = _message("Strings")
SamplingParams = _message("SamplingParams")
GenerateRequest = _message("GenerateRequest")
TopLogprob = _message("TopLogprob")
TokenLogprobs = _message("TokenLogprobs")
Finish = _message("Finish")
Sample = _message("Sample")
PromptInfo = _message("PromptInfo")
GenerateResponse = _message("GenerateResponse")
GenerateChunk = _message("GenerateChunk")
ScoreRequest = _message("ScoreRequest")
ScoreResponse = _message("ScoreResponse")
TokenizeRequest = _message("TokenizeRequest")
DetokenizeResponse = _message("DetokenizeResponse")
ServerInfo = _message("ServerInfo")
ModelInfo = _message("ModelInfo")
AbortRequest = _message("AbortRequest")
AbortResponse = _message("AbortResponse")
SleepRequest = _message("SleepRequest")
WakeUpRequest = _message("WakeUpRequest")
WeightsHeader = _message("WeightsHeader")
TensorChunk = _message("TensorChunk")
UpdateWeightsRequest = _message("UpdateWeightsRequest")
UpdateWeightsResponse = _message("UpdateWeightsResponse")
ResetPrefixCacheRequest = _message("ResetPrefixCacheRequest")
ResetPrefixCacheResponse = _message("ResetPrefixCacheResponse")
