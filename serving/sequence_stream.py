"""One sequence on the text side: news from the engine become text, cut at stop strings."""

import dataclasses
from collections.abc import Sequence

from jaxllm.sampling_params import SamplingParams
from jaxllm.text.output import SequenceText
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
            if self.logprobs is None:
                self.logprobs = later.logprobs
            else:
                self.logprobs += later.logprobs
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = later.prompt_logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason


class SequenceStream:
    """Text of one sequence.

    Attributes:
      num_tokens: output tokens so far.
    """

    __slots__ = ("_end_ids", "_text", "num_tokens")

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        eos_token_ids: frozenset[int],
    ):
        self.num_tokens = 0
        self._text = SequenceText(tokenizer, prompt_token_ids, params)
        self._end_ids = frozenset(params.stop_token_ids or ())
        # The end of a grammar is marked by an end token whether or not those are ignored.
        if not params.ignore_eos or params.structured_outputs is not None:
            self._end_ids |= eos_token_ids

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
        text = self._text
        delta.text, count = text.extend(
            output.token_ids,
            finished=output.finish_reason is not None,
            stopped=output.finish_reason == "stop",
            end_ids=self._end_ids,
        )
        self.num_tokens += count
        if text.stop_string is not None:
            delta.token_ids = output.token_ids[:count]
            if output.logprobs is not None:
                delta.logprobs = output.logprobs[:count]
            delta.finish_reason, delta.stop_reason = "stop", text.stop_string
        return delta
