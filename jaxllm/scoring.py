"""Log probabilities of a given continuation, by generation of one token after it."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxllm.errors import ParameterError
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.input import ProcessedPrompt

if TYPE_CHECKING:
    from jaxllm.llm import LLM


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """Log probabilities of a continuation.

    Attributes:
      token_ids: of the continuation.
      logprobs: natural logarithms, one per token.
    """

    token_ids: list[int]
    logprobs: list[float]

    @property
    def total(self) -> float:
        return sum(self.logprobs)


def score_continuation(
    llm: "LLM", prompt: ProcessedPrompt, continuation: str | Sequence[int]
) -> Score:
    """See `LLM.score`."""
    if isinstance(continuation, str):
        tail = llm.get_tokenizer().encode(continuation, add_special_tokens=False)
    else:
        tail = list(continuation)
    if not tail:
        raise ParameterError("continuation", continuation, "must have at least one token")
    ids: dict[str, Any] = {"prompt_token_ids": [*prompt.token_ids, *tail]}
    if prompt.cache_salt is not None:
        ids["cache_salt"] = prompt.cache_salt
    # One token is sampled and dropped: a step without a sample has no end in the scheduler.
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    output = llm.generate(ids, params, use_tqdm=False)[0]
    entries = (output.prompt_logprobs or [])[-len(tail) :]
    logprobs = [entry[token].logprob for entry, token in zip(entries, tail, strict=True) if entry]
    return Score(tail, logprobs)
