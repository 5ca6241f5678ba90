"""One sequence on the text side: news from the engine become text, cut at stop strings."""

import dataclasses
from collections.abc import Sequence

from jaxllm.sampling_params import SamplingParams
from jaxllm.text.detokenizer import IncrementalDetokenizer
from jaxllm.text.stop_strings import StopChecker
from jaxllm.text.tokenizer import Tokenizer
from serving.engine.messages import LogprobRow, Output


@dataclasses.dataclass(slots=True)
class Delta:
    """What came anew for one choice; deltas of a choice can be merged.

    Attributes:
      token_ids: sampled ids, the ending one included.
      logprobs: a row per token, None where none were asked for.
      prompt_logprobs: a row per prompt token, once, where they were asked for.
      finish_reason: "stop", "length", "abort" or "error"; None while running.
    """

    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[LogprobRow] | None = None
    prompt_logprobs: list[LogprobRow | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def merge(self, later: "Delta") -> None:
        """Takes in the delta that follows this one."""
        self.text += later.text
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *later.logprobs]
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = later.prompt_logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason


class SequenceStream:
    """Detokenizer and stop strings of one sequence.

    Attributes:
      num_tokens: output tokens so far.
    """

    __slots__ = ("_checker", "_detokenizer", "_end_ids", "_include", "_min_tokens", "num_tokens")

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        eos_token_ids: frozenset[int],
    ):
        self.num_tokens = 0
        self._min_tokens = params.min_tokens
        self._include = params.include_stop_str_in_output
        self._end_ids = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            self._end_ids |= eos_token_ids
        self._detokenizer: IncrementalDetokenizer | None = None
        self._checker: StopChecker | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
            stop = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
            if stop:
                self._checker = StopChecker(stop, self._include)

    def feed(self, output: Output) -> Delta:
        """Takes the engine's news; a delta with a finish_reason is the last one.

        Where a stop string ended the output and the engine does not know yet (its own
        finish_reason is None), the caller has to abort the sequence.
        """
        delta = Delta(
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
        )
        if self._detokenizer is None:
            self.num_tokens += len(output.token_ids)
            return delta
        for place, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            is_last = place == len(output.token_ids) - 1
            if (
                is_last
                and output.finish_reason == "stop"
                and token_id in self._end_ids
                and not self._include
            ):
                # The token that ends the output is no part of its text.
                break
            stopped = self._add(self._detokenizer.append([token_id]), delta)
            if stopped is not None:
                delta.token_ids = output.token_ids[: place + 1]
                if output.logprobs is not None:
                    delta.logprobs = output.logprobs[: place + 1]
                delta.finish_reason, delta.stop_reason = "stop", stopped
                return delta
        if output.finish_reason is not None:
            stopped = self._add(self._detokenizer.finish(), delta)
            if stopped is not None:
                delta.finish_reason, delta.stop_reason = "stop", stopped
            elif self._checker is not None:
                delta.text += self._checker.finish().text
        return delta

    def _add(self, text: str, delta: Delta) -> str | None:
        """Adds what may go out of new text; returns the stop string that ends the output."""
        if self._checker is None:
            delta.text += text
            return None
        # A stop string counts only in output beyond min_tokens.
        result = self._checker.feed(text, search=self.num_tokens > self._min_tokens)
        delta.text += result.text
        return result.matched
