"""What a caller gets back."""

import dataclasses


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One sampled continuation.

    Attributes:
      index: which of the n samples of its prompt.
      text: decoded output, "" with detokenize=False.
      token_ids: sampled ids, the ending one included.
      finish_reason: "stop", "length", "abort" or "error"; None while running.
      stop_reason: the stop token id that ended it; None for end of sequence.
    """

    index: int
    text: str
    token_ids: list[int]
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
      num_cached_tokens: prompt tokens taken from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
