"""A request on its way: prompts, sequences, and the deltas that its reader has not taken."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence

from jaxllm.errors import ParameterError
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.input import ProcessedPrompt
from serving.engine.messages import LogprobRow
from serving.errors import ServingError
from serving.metrics import RequestTimes
from serving.sequence_stream import Delta, SequenceStream


@dataclasses.dataclass(slots=True)
class Job:
    """A prompt with its parameters, ready for the engine.

    Attributes:
      interval: tokens of a sample from one delta to the next, but for the first and the last one.
    """

    prompt: ProcessedPrompt
    params: SamplingParams
    priority: int = 0
    interval: int = 1


@dataclasses.dataclass(slots=True)
class PromptState:
    """What is known of a prompt of a request.

    Attributes:
      num_cached_tokens: None until it was scheduled.
      prompt_logprobs: a row per prompt token once they are known.
    """

    job: Job
    num_cached_tokens: int | None = None
    prompt_logprobs: list[LogprobRow | None] | None = None


class ServedSequence:
    __slots__ = ("began", "choice", "held", "prompt", "request", "stream", "times")

    def __init__(
        self,
        request: "GenerationStream",
        prompt: PromptState,
        choice: int,
        stream: SequenceStream,
        times: RequestTimes,
    ):
        self.request = request
        self.prompt = prompt
        self.choice = choice
        self.stream = stream
        self.times = times
        self.held = Delta()
        self.began = False

    def give(self, delta: Delta) -> None:
        """Passes news on, as often as the job wants them."""
        if self.prompt.job.interval == 1:
            self.request.put(self.choice, delta)
            return
        self.held.merge(delta)
        interval = self.prompt.job.interval
        if self.began and delta.finish_reason is None and len(self.held.token_ids) < interval:
            return
        self.began = True
        held, self.held = self.held, Delta()
        self.request.put(self.choice, held)


class GenerationStream:
    """The deltas of one request, over all its prompts and samples.

    Choice `p * n + s` is sample s of prompt p. Iterating gives lists of (choice, Delta), merged if
    the reader was slow. `close` ends what still runs; it must be called in every case.

    Attributes:
      request_id: what the caller named it.
      prompts: one state per prompt.
    """

    def __init__(
        self,
        request_id: str,
        prompts: list[PromptState],
        abort: Callable[[Sequence[str]], None],
    ):
        self._abort = abort
        self.request_id = request_id
        self.prompts = prompts
        self.running: dict[str, ServedSequence] = {}
        self._pending: dict[int, Delta] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._error: ServingError | None = None

    def put(self, choice: int, delta: Delta) -> None:
        earlier = self._pending.get(choice)
        if earlier is None:
            self._pending[choice] = delta
            self._wake()
        else:
            earlier.merge(delta)

    def fail(self, error: ServingError) -> None:
        self._error = error
        self._wake()

    def __aiter__(self) -> AsyncIterator[list[tuple[int, Delta]]]:
        return self

    async def __anext__(self) -> list[tuple[int, Delta]]:
        if not self._pending:
            await self.wait()
            if not self._pending:
                raise StopAsyncIteration
        pending, self._pending = self._pending, {}
        return list(pending.items())

    async def wait(self) -> None:
        """Until there is news; raises the error if that is it. One waits at a time."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self.running:
                return
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def close(self) -> None:
        """Ends what still runs, within a step."""
        if self.running:
            self._abort(list(self.running))


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raises ParameterError for a token id in `params` that is outside the vocabulary."""
    named = {
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids,
        "logit_bias": params.logit_bias,
    }
    for field, ids in named.items():
        for token in ids or ():
            if not 0 <= token < vocab_size:
                raise ParameterError(
                    field, token, f"token ids must be in the vocabulary, 0 to {vocab_size - 1}"
                )
