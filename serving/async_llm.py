"""AsyncLLM: the engine behind an asyncio interface, with text on this side and tokens on the other.

Requests are checked and tokenised here, sent to the engine process as token ids, and their news
become text here. Whoever reads slowly gets merged deltas; nothing waits for a reader.
"""

import asyncio
import itertools
import logging
import random
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.input import ProcessedPrompt, Prompt, process_prompt
from jaxllm.text.tokenizer import (
    Tokenizer,
    import_auto_tokenizer,
    load_tokenizer,
    tokenizer_format,
)
from serving.admission import Admission, AdmissionLimits
from serving.engine.messages import Abort, Add, Description, StepNews, pack_params
from serving.engine.supervisor import RestartPolicy, Supervisor
from serving.errors import (
    NotReadyError,
    OverloadedError,
    RequestFailedError,
    RequestRefusedError,
    ServingError,
)
from serving.generation import (
    GenerationStream,
    Job,
    PromptState,
    ServedSequence,
    check_token_ids,
)
from serving.metrics import Metrics, RequestTimes
from serving.sequence_stream import Delta, SequenceStream
from serving.tracing import note_submitted
from serving.weights import ServedWeights

logger = logging.getLogger(__name__)

# Texts longer than this are tokenised in a thread, so that others are served meanwhile.
_LONG_TEXT = 4096
# After so much news of one step, the event loop gets a turn.
_NEWS_PER_SLICE = 128


class AsyncLLM:
    """One engine, its supervisor and the text side.

    Attributes:
      tokenizer: None with skip_tokenizer_init.
      metrics: counters and gauges for Prometheus.
      weights: sleep, wake-up and new weights.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        model_name: str,
        limits: AdmissionLimits | None = None,
        restarts: RestartPolicy | None = None,
        hang_timeout: float = 120.0,
        progress: bool = False,
        engine_module: str = "serving.engine.process",
    ):
        self.config = config
        self.metrics = Metrics(model_name)
        self.tokenizer: Tokenizer | None = None
        self.draining = False
        self.paused = False
        self.weights = ServedWeights(self.call)
        self._sequences: dict[str, ServedSequence] = {}
        self._ids = itertools.count()
        self._seeds = random.Random(config.seed)
        self._admission = Admission(limits or AdmissionLimits())
        self._news: asyncio.Queue[StepNews] = asyncio.Queue()
        self._supervisor = Supervisor(
            config,
            restarts or RestartPolicy(),
            on_news=self._news.put_nowait,
            on_loss=self._fail_all,
            has_work=lambda: bool(self._sequences) and not self._is_halted,
            hang_timeout=hang_timeout,
            progress=progress,
            engine_module=engine_module,
        )
        self._handler: asyncio.Task[None] | None = None

    @property
    def description(self) -> Description:
        """Of the engine; NotReadyError before it was ready for the first time."""
        if self._supervisor.description is None:
            raise NotReadyError("the engine is starting")
        return self._supervisor.description

    @property
    def supervisor(self) -> Supervisor:
        return self._supervisor

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset(self.description.eos_token_ids)

    @property
    def num_unfinished(self) -> int:
        """Sequences that run or wait."""
        return len(self._sequences)

    async def start(self) -> None:
        """Starts the engine process and loads the tokenizer.

        Raises:
          EngineStartError: the engine could not start.
          TokenizerError: the tokenizer cannot be loaded.
        """
        if self._will_import_library():
            # It takes as long to import as the engine process takes to import its own.
            imported = asyncio.to_thread(import_auto_tokenizer)
            description, _ = await asyncio.gather(self._supervisor.start(), imported)
        else:
            description = await self._supervisor.start()
        if description.tokenizer is not None:
            source = description.tokenizer
            self.tokenizer = await asyncio.to_thread(
                load_tokenizer,
                source,
                format=tokenizer_format(source),
                revision=description.revision,
            )
        self.metrics.describe(description)
        self._admission.max_num_seqs = description.max_num_seqs
        self._handler = asyncio.get_running_loop().create_task(self._handle_news())

    def _will_import_library(self) -> bool:
        """Whether loading the tokenizer will need transformers."""
        config = self.config
        if config.skip_tokenizer_init:
            return False
        named = config.tokenizer or config.model
        return tokenizer_format(named, is_model=not config.tokenizer) != "gguf"

    def check_ready(self) -> None:
        """Raises NotReadyError with the reason if no request can be taken now."""
        self._check_started()
        if self.weights.is_sleeping:
            raise NotReadyError("the engine sleeps; wake it up first")

    @property
    def _is_halted(self) -> bool:
        """The engine ends no step now, and need not."""
        return self.paused or self.weights.is_sleeping or self.weights.is_changing

    def _check_started(self) -> None:
        if self.draining:
            raise NotReadyError("the server is shutting down")
        self._supervisor.check_ready()
        if self._handler is None:
            raise NotReadyError("the tokenizer is being loaded")

    def check_door(self) -> None:
        """Raises what any request would meet now, before work is spent on it.

        Raises:
          NotReadyError: there is no engine to take it.
          OverloadedError: not even the smallest request would be let in.
        """
        self.check_ready()
        self._admit(1, 0)

    def _admit(self, count: int, tokens: int) -> None:
        try:
            self._admission.admit(count, tokens)
        except OverloadedError as error:
            self.metrics.count_rejection(error.reason)
            raise

    async def process_prompt(self, prompt: Prompt, **options: Any) -> ProcessedPrompt:
        """`text.input.process_prompt` with this model's limits; long texts in a thread."""
        description = self.description
        limits: dict[str, Any] = {
            "max_model_len": description.max_model_len,
            "vocab_size": description.vocab_size,
        }
        content = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        if isinstance(content, str) and len(content) > _LONG_TEXT:
            return await asyncio.to_thread(
                process_prompt, prompt, self.tokenizer, **limits, **options
            )
        return process_prompt(prompt, self.tokenizer, **limits, **options)

    def submit(self, jobs: Sequence[Job], request_id: str) -> GenerationStream:
        """Sends a request of one or more prompts to the engine.

        Raises:
          NotReadyError: there is no engine to take it.
          OverloadedError: admission control refuses it, whole.
          ParameterError: a token id is outside the vocabulary.
        """
        self.check_ready()
        vocab_size = self.description.vocab_size
        for job in jobs:
            check_token_ids(job.params, vocab_size)
        count = sum(job.params.n for job in jobs)
        tokens = sum(len(job.prompt.token_ids) * job.params.n for job in jobs)
        self._admit(count, tokens)
        request = GenerationStream(request_id, [PromptState(job) for job in jobs], self.abort)
        now = time.monotonic()
        choice = 0
        for prompt in request.prompts:
            job = prompt.job
            params = job.params
            seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
            packed = pack_params(params)
            for sample in range(params.n):
                # The caller's id helps whoever reads logs; the number keeps ids apart.
                internal_id = f"{request_id}-{next(self._ids)}"
                times = RequestTimes(now, len(job.prompt.token_ids), params, sample == 0)
                stream = SequenceStream(
                    self.tokenizer, job.prompt.token_ids, params, self.eos_token_ids
                )
                sequence = ServedSequence(request, prompt, choice, stream, times)
                request.running[internal_id] = self._sequences[internal_id] = sequence
                self._admission.queue(internal_id, len(job.prompt.token_ids))
                self._supervisor.send(
                    Add(
                        internal_id,
                        job.prompt.token_ids,
                        packed,
                        seed + sample,
                        job.priority,
                        job.prompt.cache_salt,
                        now,
                    )
                )
                choice += 1
        sent = [sequence.times for sequence in request.running.values()]
        note_submitted(request_id, jobs[0].params, sent)
        return request

    async def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str = "generate"
    ) -> AsyncIterator[tuple[int, Delta]]:
        """Deltas of one prompt as (sample, Delta); leaving the loop ends the request."""
        job = Job(await self.process_prompt(prompt), params)
        stream = self.submit([job], request_id)
        try:
            async for deltas in stream:
                for delta in deltas:
                    yield delta
        finally:
            stream.close()

    def abort(self, internal_ids: Sequence[str]) -> None:
        """Ends sequences within a step; no more news of them comes."""
        for internal_id in internal_ids:
            sequence = self._sequences.get(internal_id)
            if sequence is not None:
                self.metrics.finish(sequence.times, "abort", time.monotonic())
                self._forget(internal_id, sequence)
        self._supervisor.send(Abort(list(internal_ids)))

    def abort_requests(self, request_ids: Sequence[str]) -> int:
        """Ends requests by their ids; they finish with reason "abort". Returns how many."""
        wanted = set(request_ids)
        found = {
            id(sequence.request): sequence.request
            for sequence in self._sequences.values()
            if sequence.request.request_id in wanted
        }
        for request in found.values():
            for sequence in list(request.running.values()):
                sequence.give(Delta(finish_reason="abort"))
            request.close()
        return len(found)

    async def pause(self) -> None:
        """Starts no step until `resume`; requests keep what they have and new ones wait."""
        await self.call("pause")
        self.paused = True

    async def resume(self) -> None:
        await self.call("resume")
        self.paused = False

    async def call(self, name: str, **arguments: Any) -> Any:
        """Runs a control function of the engine, which may be asleep.

        Raises:
          NotReadyError, EngineDeadError: there is no engine to do it.
          ControlError: it could not.
        """
        self._check_started()
        return await self._supervisor.call(name, **arguments)

    async def close(self) -> None:
        """Ends the engine process; requests in flight get an error."""
        self.draining = True
        self._fail_all(NotReadyError("the server is shutting down"))
        await self._supervisor.close()
        if self._handler is not None:
            self._handler.cancel()

    async def _handle_news(self) -> None:
        while True:
            news = await self._news.get()
            try:
                await self._handle(news)
            except Exception:
                logger.exception("news of a step could not be handled")
            # Readers get their turn between steps, however many have piled up.
            await asyncio.sleep(0)

    async def _handle(self, news: StepNews) -> None:
        self.metrics.record_step(news.stats)
        self._admission.num_waiting = news.stats.num_waiting
        for started in news.started:
            sequence = self._sequences.get(started.request_id)
            self._admission.start(started.request_id, started.time)
            if sequence is not None:
                sequence.times.scheduled = started.time
                sequence.times.num_cached_tokens = started.num_cached_tokens
                if sequence.prompt.num_cached_tokens is None:
                    sequence.prompt.num_cached_tokens = started.num_cached_tokens
        for refused in news.refused:
            sequence = self._sequences.get(refused.request_id)
            if sequence is not None:
                self._fail(sequence.request, RequestRefusedError(refused.message))
        step_tokens = 0
        for count, output in enumerate(news.outputs, 1):
            sequence = self._sequences.get(output.request_id)
            if sequence is None:
                continue
            if output.finish_reason == "error":
                what = output.stop_reason or news.failure or "the step failed"
                self._fail(sequence.request, RequestFailedError(str(what)))
                continue
            delta = sequence.stream.feed(output)
            if delta.prompt_logprobs is not None:
                sequence.prompt.prompt_logprobs = delta.prompt_logprobs
            step_tokens += self.metrics.record_tokens(
                sequence.times, len(delta.token_ids), news.time
            )
            if delta.finish_reason is not None:
                sequence.times.num_preemptions = output.num_preemptions
                self.metrics.finish(sequence.times, delta.finish_reason, news.time)
                self._forget(output.request_id, sequence)
                if output.finish_reason is None:
                    self._supervisor.send(Abort([output.request_id]))
            sequence.give(delta)
            if count % _NEWS_PER_SLICE == 0:
                await asyncio.sleep(0)
        if step_tokens:
            self.metrics.iteration_tokens.observe(step_tokens)

    def _fail(self, request: GenerationStream, error: ServingError) -> None:
        """Ends a whole request with an error: its other samples are of no use to anybody."""
        others = list(request.running)
        now = time.monotonic()
        for internal_id, sequence in list(request.running.items()):
            self.metrics.finish(sequence.times, "error", now)
            self._forget(internal_id, sequence)
        self._supervisor.send(Abort(others))
        request.fail(error)

    def _fail_all(self, error: ServingError) -> None:
        for sequence in list(self._sequences.values()):
            if sequence.request.running:
                self._fail(sequence.request, error)
        while not self._news.empty():
            self._news.get_nowait()
        self._admission.clear()
        self.paused = False
        self.weights.forget()
        self.metrics.engine_lost()

    def _forget(self, internal_id: str, sequence: ServedSequence) -> None:
        self._sequences.pop(internal_id, None)
        sequence.request.running.pop(internal_id, None)
        self._admission.end(internal_id)
