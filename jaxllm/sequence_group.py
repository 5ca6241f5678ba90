"""SequenceGroup: a prompt and its n samples, from checked request to what the caller sees."""

import dataclasses
import time
from collections.abc import Callable

from jaxllm.engine.request import FinishReason, GrammarState, Request
from jaxllm.engine.step_plan import EngineOutput
from jaxllm.outputs import CompletionOutput, PositionLogprobs, RequestMetrics, RequestOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.text.bad_words import bad_word_ids
from jaxllm.text.input import ProcessedPrompt
from jaxllm.text.output import SequenceText, position_logprobs
from jaxllm.text.tokenizer import Tokenizer


@dataclasses.dataclass(slots=True)
class Sequence:
    """One sample on its way."""

    request: Request
    text: SequenceText
    index: int
    logprobs: list[PositionLogprobs] | None
    cumulative_logprob: float = 0.0
    stopped_by: str | None = None
    finished: bool = False


class SequenceGroup:
    """A prompt's samples, each a request of its own; sample i is seeded with seed + i.

    Args:
      new_grammar: makes the grammar state of one sample; None without structured output.
    """

    def __init__(
        self,
        request_id: str,
        prompt: ProcessedPrompt,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        *,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        seed: int,
        priority: int = 0,
        new_grammar: Callable[[], GrammarState] | None = None,
    ):
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.tokenizer = tokenizer
        self.finished_time: float | None = None
        self._end_ids = frozenset(params.stop_token_ids or ())
        # The end of a grammar is marked by an end token whether or not those are ignored.
        if not params.ignore_eos or new_grammar is not None:
            self._end_ids |= eos_token_ids
        words = bad_word_ids(tokenizer, params.bad_words or ())
        self.sequences = []
        for index in range(params.n):
            request = Request(
                request_id if params.n == 1 else f"{index}_{request_id}",
                prompt.token_ids,
                params,
                max_model_len=max_model_len,
                seed=seed + index,
                eos_token_ids=eos_token_ids,
                priority=priority,
                cache_salt=prompt.cache_salt,
                bad_word_ids=words,
                grammar=None if new_grammar is None else new_grammar(),
            )
            text = SequenceText(tokenizer, prompt.token_ids, params)
            logprobs: list[PositionLogprobs] | None = None if params.logprobs is None else []
            self.sequences.append(Sequence(request, text, index, logprobs))

    @property
    def finished(self) -> bool:
        return all(sequence.finished for sequence in self.sequences)

    def take(self, sequence: Sequence, output: EngineOutput) -> str:
        """Records news of one sample; returns its new text.

        `sequence.finished` is then also True if a stop string was met, of which the engine knows
        nothing.
        """
        reason = output.finish_reason
        delta, _ = sequence.text.extend(
            output.new_token_ids,
            finished=reason is not None,
            stopped=reason is FinishReason.STOP,
            end_ids=self._end_ids,
        )
        self._take_logprobs(sequence, output)
        sequence.stopped_by = sequence.text.stop_string
        sequence.finished = reason is not None or sequence.stopped_by is not None
        if self.finished:
            self.finished_time = time.monotonic()
        return delta

    def output(self) -> RequestOutput:
        """All there is so far."""
        return self._wrap([self._completion(sequence) for sequence in self.sequences])

    def update(self, sequence: Sequence, delta: str, output: EngineOutput) -> RequestOutput | None:
        """What a stream shows after `take`, by params.output_kind; None for nothing now."""
        kind = self.params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY:
            return self.output() if self.finished else None
        if kind is RequestOutputKind.CUMULATIVE:
            return self.output()
        completion = self._completion(sequence)
        completion.text = delta
        completion.token_ids = output.new_token_ids
        if completion.logprobs is not None:
            completion.logprobs = completion.logprobs[-len(output.new_token_ids) :]
        return self._wrap([completion])

    def _take_logprobs(self, sequence: Sequence, output: EngineOutput) -> None:
        if sequence.logprobs is None or output.logprobs is None:
            return
        ids = sequence.request.token_ids
        first = len(ids) - len(output.logprobs)
        for i, raw in enumerate(output.logprobs):
            context = ids[max(first + i - 8, 0) : first + i]
            sequence.logprobs.append(position_logprobs(raw, self.tokenizer, context))
            sequence.cumulative_logprob += raw.logprob

    def _completion(self, sequence: Sequence) -> CompletionOutput:
        request = sequence.request
        by_string = sequence.stopped_by is not None
        return CompletionOutput(
            index=sequence.index,
            text=sequence.text.text,
            token_ids=request.output_token_ids,
            cumulative_logprob=(None if sequence.logprobs is None else sequence.cumulative_logprob),
            logprobs=None if sequence.logprobs is None else list(sequence.logprobs),
            finish_reason=FinishReason.STOP if by_string else request.finish_reason,
            stop_reason=sequence.stopped_by if by_string else request.stop_reason,
        )

    def _wrap(self, completions: list[CompletionOutput]) -> RequestOutput:
        first = self.sequences[0].request
        times = [s.request.first_token_time for s in self.sequences]
        known = [t for t in times if t is not None]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.prompt_text,
            prompt_token_ids=self.prompt.token_ids,
            prompt_logprobs=self._prompt_logprobs(first),
            outputs=completions,
            finished=self.finished,
            num_cached_tokens=first.num_cached_tokens,
            metrics=RequestMetrics(
                first.arrival_time,
                first.first_scheduled_time,
                min(known, default=None),
                self.finished_time,
            ),
        )

    def _prompt_logprobs(self, request: Request) -> list[PositionLogprobs | None] | None:
        if self.params.prompt_logprobs is None:
            return None
        ids = self.prompt.token_ids
        return [None] + [
            position_logprobs(raw, self.tokenizer, ids[max(i - 8, 0) : i])
            for i, raw in enumerate(request.prompt_logprobs, start=1)
        ]
