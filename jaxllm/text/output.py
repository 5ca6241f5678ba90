"""From sampled token ids to what a caller sees: text, stop strings, log probabilities."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxllm.outputs import Logprob, PositionLogprobs
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.detokenizer import IncrementalDetokenizer
from jaxllm.text.logprob_text import describe_tokens
from jaxllm.text.stop_strings import StopChecker
from jaxllm.text.tokenizer import Tokenizer


class RawLogprobs(Protocol):
    """Log probabilities at one position, as the token side gives them."""

    @property
    def token_id(self) -> int: ...
    @property
    def logprob(self) -> float: ...
    @property
    def rank(self) -> int: ...
    @property
    def top_ids(self) -> np.ndarray | None: ...
    @property
    def top_logprobs(self) -> np.ndarray: ...


class SequenceText:
    """Text of one growing output.

    Args:
      tokenizer: None leaves the text empty.
      prompt_token_ids: what the output follows.
      params: how to decode, and which strings stop.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
    ):
        self.text = ""
        self.stop_string: str | None = None
        self._params = params
        self._num_tokens = 0
        self._stream: IncrementalDetokenizer | None = None
        self._checker = (
            StopChecker(list(params.stop), params.include_stop_str_in_output)
            if params.stop
            else None
        )
        if tokenizer is not None and params.detokenize:
            self._stream = IncrementalDetokenizer(
                tokenizer,
                prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )

    def append(self, token_id: int, ends: bool = False) -> str:
        """Takes the next id, and returns the text that may go out.

        Args:
          ends: the token ends the output; its own text is left out unless
            include_stop_str_in_output.
        """
        self._num_tokens += 1
        if self._stream is None or (ends and not self._params.include_stop_str_in_output):
            return ""
        return self._release(self._stream.append([token_id]))

    def extend(
        self,
        token_ids: Sequence[int],
        *,
        finished: bool = False,
        stopped: bool = False,
        end_ids: frozenset[int] = frozenset(),
    ) -> tuple[str, int]:
        """Takes the news of a step.

        Args:
          finished: the engine ended the output with these ids.
          stopped: it did so because of the last of them, or of what that completes.
          end_ids: ids that end an output, whose own text is left out. A grammar may also end one
            after a token that is part of the text.

        Returns:
          The text that may go out, and how many of the ids belong to the output: those after the
          one that completes a stop string do not.
        """
        delta = ""
        for count, token_id in enumerate(token_ids, 1):
            ends = stopped and count == len(token_ids) and token_id in end_ids
            delta += self.append(token_id, ends)
            if self.stop_string is not None:
                return delta, count
        if finished:
            delta += self.finish()
        return delta, len(token_ids)

    def finish(self) -> str:
        """Ends the output, and returns the text that was held back."""
        if self._stream is None or self.stop_string is not None:
            return ""
        delta = self._release(self._stream.finish())
        if self._checker is not None and self.stop_string is None:
            held = self._checker.finish().text
            self.text += held
            delta += held
        return delta

    def _release(self, delta: str) -> str:
        if self._checker is not None and self.stop_string is None:
            search = self._num_tokens > self._params.min_tokens
            result = self._checker.feed(delta, search)
            delta, self.stop_string = result.text, result.matched
        self.text += delta
        return delta


def position_logprobs(
    raw: RawLogprobs, tokenizer: Tokenizer | None, context: Sequence[int]
) -> PositionLogprobs:
    """The token at a position first, then the most probable ones by rank, with their texts.

    Args:
      context: the tokens before the position.
    """
    ids = range(len(raw.top_logprobs)) if raw.top_ids is None else raw.top_ids.tolist()
    values = raw.top_logprobs.tolist()
    if raw.top_ids is None:
        order = np.argsort(-raw.top_logprobs, kind="stable")
        ranks = np.empty(len(order), int)
        ranks[order] = np.arange(1, len(order) + 1)
        rank_list = ranks.tolist()
    else:
        rank_list = list(range(1, len(values) + 1))
    entries = {raw.token_id: (raw.logprob, raw.rank)}
    for token_id, value, rank in zip(ids, values, rank_list, strict=True):
        entries.setdefault(token_id, (value, rank))
    texts = describe_tokens(tokenizer, list(entries), context)
    return {
        token_id: Logprob(value, rank, text.token)
        for (token_id, (value, rank)), text in zip(entries.items(), texts, strict=True)
    }
