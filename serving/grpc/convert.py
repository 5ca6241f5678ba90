"""Between protobuf messages and the engine's own types."""

from collections.abc import Sequence
from typing import Any

from serving.engine.messages import LogprobRow
from serving.grpc import messages as pb
from serving.sequence_stream import Delta

_STRUCTURED = {
    "json_schema": "json",
    "regex": "regex",
    "grammar": "grammar",
    "json_object": "json_object",
}
_REPEATED = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")
_NOT_SAMPLING = ("max_tokens", "truncate_prompt_tokens", "logit_bias")


def params_values(params: pb.SamplingParams) -> dict[str, Any]:
    """Fields of SamplingParams that are set, but for those that need the prompt."""
    values: dict[str, Any] = {}
    for field, value in params.ListFields():
        name = field.name
        if name in _REPEATED:
            values[name] = list(value)
        elif name in _STRUCTURED:
            values["structured_outputs"] = {_STRUCTURED[name]: value}
        elif name == "choice":
            values["structured_outputs"] = {"choice": list(value.values)}
        elif name not in _NOT_SAMPLING:
            # A float of 32 bits is not quite the number that was meant: 0.7, 0.1.
            values[name] = round(value, 6) if isinstance(value, float) else value
    if params.logit_bias:
        values["logit_bias"] = dict(params.logit_bias)
    return values


def prompt_value(prompt: pb.Prompt, cache_salt: str | None) -> dict[str, Any]:
    """A prompt as `text.input` takes it."""
    kind = prompt.WhichOneof("content")
    if kind == "token_ids":
        return {"prompt_token_ids": list(prompt.token_ids.ids), "cache_salt": cache_salt}
    return {"prompt": prompt.text, "cache_salt": cache_salt}


def token_logprobs(rows: Sequence[LogprobRow | None]) -> list[pb.TokenLogprobs]:
    """A message per row that there is."""
    return [
        pb.TokenLogprobs(
            token_id=row.token_ids[0],
            logprob=row.logprobs[0],
            rank=row.ranks[0],
            others=[
                pb.TopLogprob(token_id=token, logprob=value, rank=rank)
                for token, value, rank in zip(
                    row.token_ids[1:], row.logprobs[1:], row.ranks[1:], strict=True
                )
            ],
        )
        for row in rows
        if row is not None
    ]


def sample_message(index: int, delta: Delta) -> pb.Sample:
    sample = pb.Sample(
        index=index,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=token_logprobs(delta.logprobs or []),
    )
    if delta.finish_reason is not None:
        sample.finish.reason = delta.finish_reason
        if isinstance(delta.stop_reason, str):
            sample.finish.stop_string = delta.stop_reason
        elif delta.stop_reason is not None:
            sample.finish.stop_token_id = delta.stop_reason
    return sample
