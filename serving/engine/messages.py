"""What travels between the API process and the engine process, as msgpack.

Each direction carries a list of commands, or one piece of news, per message. Times are seconds on
the monotonic clock, which processes of a machine share.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from jaxllm.sampling_params import SamplingParams
from jaxllm.structured_outputs import StructuredOutputs


class Start(msgspec.Struct, tag="start", array_like=True, frozen=True):
    """The first command: fields of EngineConfig, and how much to log."""

    config: dict[str, Any]
    log_level: int
    progress: bool


class Add(msgspec.Struct, tag="add", array_like=True, frozen=True):
    """A sequence to generate."""

    request_id: str
    prompt_token_ids: list[int]
    params: dict[str, Any]
    seed: int
    priority: int
    cache_salt: str | None
    arrival_time: float


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    request_ids: list[str]


class Call(msgspec.Struct, tag="call", array_like=True, frozen=True):
    """A control function by name; a Reply of the same `call_id` answers."""

    call_id: int
    name: str
    arguments: dict[str, Any] = {}


class Stop(msgspec.Struct, tag="stop", array_like=True, frozen=True):
    """Ends the process."""


Command = Start | Add | Abort | Call | Stop


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What the API process must know of a started engine.

    Attributes:
      tokenizer: folder, hub id or .gguf file; None when the engine serves token ids only.
      generation_config: the model's own sampling defaults.
      config: the fields of EngineConfig as asked for.
    """

    tokenizer: str | None
    revision: str | None
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    eos_token_ids: list[int]
    generation_config: dict[str, Any]
    config: dict[str, Any]
    start_seconds: float


class Ready(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    description: Description


class Failed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """The engine could not start."""

    message: str
    user_can_mend: bool


class Reply(msgspec.Struct, tag="reply", array_like=True, frozen=True):
    """What a control function gave, or why it failed and whose fault that is (ControlError)."""

    call_id: int
    result: Any
    error: str | None = None
    fault: str = "argument"


class LogprobRow(msgspec.Struct, array_like=True, frozen=True):
    """Logprobs at one position: the token itself first, then the most probable ones.

    Attributes:
      token_ids, logprobs: of equal length.
      ranks: 1 for the most probable token of the vocabulary.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class Output(msgspec.Struct, array_like=True, frozen=True):
    """News of one sequence after a step."""

    request_id: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_preemptions: int = 0
    logprobs: list[LogprobRow] | None = None
    prompt_logprobs: list[LogprobRow | None] | None = None


class Started(msgspec.Struct, array_like=True, frozen=True):
    """A sequence was scheduled for the first time."""

    request_id: str
    time: float
    num_cached_tokens: int


class Refused(msgspec.Struct, array_like=True, frozen=True):
    """The engine does not take a sequence."""

    request_id: str
    message: str


class Stats(msgspec.Struct, array_like=True, frozen=True):
    """State of the engine after a step; counters since the start of the process.

    Attributes:
      kv_usage: share of the KV blocks that requests hold, 0 to 1.
      step_tokens: tokens that the step computed, prompt and output.
      prefix_queries, prefix_hits: tokens looked up in and found in the prefix cache.
      num_compiled: programs compiled since the engine was ready.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    step_tokens: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_compiled: int = 0


class StepNews(msgspec.Struct, tag="step", array_like=True, frozen=True):
    """All that a step changed."""

    time: float
    stats: Stats
    outputs: list[Output] = []
    started: list[Started] = []
    refused: list[Refused] = []
    failure: str | None = None


News = Ready | Failed | Reply | StepNews


def pack_params(params: SamplingParams) -> dict[str, Any]:
    """Fields of `params` that differ from their defaults, as plain data."""
    packed = {}
    for field in dataclasses.fields(SamplingParams):
        value = getattr(params, field.name)
        if field.default is dataclasses.MISSING or value != field.default:
            packed[field.name] = msgspec.to_builtins(value) if _is_nested(value) else value
    return packed


def unpack_params(packed: Mapping[str, Any]) -> SamplingParams:
    """The SamplingParams that `pack_params` took apart."""
    values = dict(packed)
    if values.get("structured_outputs") is not None:
        values["structured_outputs"] = StructuredOutputs.from_value(values["structured_outputs"])
    return SamplingParams(**values)


def _is_nested(value: Any) -> bool:
    return dataclasses.is_dataclass(value)
