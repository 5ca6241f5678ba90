"""What a caller gets back."""

import dataclasses

type PositionLogprobs = dict[int, "Logprob"]


@dataclasses.dataclass(slots=True)
class Logprob:
    """Log probability of a token at a position.

    Attributes:
      logprob: natural logarithm, at least -9999.
      rank: 1 is the most probable token of the vocabulary.
      decoded_token: the text the token completes; `token_id:<id>` without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One sampled continuation.

    Attributes:
      index: which of the n samples of its prompt.
      text: decoded output, "" with detokenize=False.
      token_ids: sampled ids, the ending one included.
      cumulative_logprob: sum over the sampled tokens; None unless logprobs were asked for.
      logprobs: per token, the sampled one first, then the most probable ones.
      finish_reason: "stop", "length", "abort" or "error"; None while running.
      stop_reason: the stop string or stop token id that ended it, the message of an error; None
        for end of sequence.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclasses.dataclass(slots=True)
class RequestMetrics:
    """Times of a request, in seconds on the monotonic clock."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """A prompt with its continuations.

    Attributes:
      prompt: the prompt's text where it was given as text, else None.
      prompt_logprobs: per prompt token, None for the first; None unless asked for.
      num_cached_tokens: prompt tokens taken from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
