"""LLM: offline generation in the caller's process."""

import dataclasses
import itertools
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from jaxllm.config import EngineConfig
from jaxllm.engine.request import FinishReason, Request
from jaxllm.engine.step_plan import EngineOutput
from jaxllm.errors import CapacityError, ConfigError, ParameterError
from jaxllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.startup import start_engine
from jaxllm.text.chat_template import encode_chat
from jaxllm.text.input import ProcessedPrompt, Prompt, process_prompt
from jaxllm.text.output import SequenceText
from jaxllm.text.tokenizer import Tokenizer

type Messages = Sequence[Mapping[str, Any]]

# Keys of generation_config.json that are defaults of sampling parameters.
_GENERATION_KEYS = ("temperature", "top_p", "top_k", "min_p")


@dataclasses.dataclass(slots=True)
class _Sequence:
    """One of the n samples of a prompt, on its way."""

    request: Request
    text: SequenceText
    index: int


@dataclasses.dataclass(slots=True)
class _Group:
    """A prompt and its samples."""

    request_id: str
    prompt: ProcessedPrompt
    sequences: list[_Sequence]
    num_unfinished: int
    finished_time: float | None = None


class LLM:
    """A model ready to generate.

    Args:
      model: folder, hub id, .gguf file, Orbax folder, or "smollm2".
      progress: show bars while loading and compiling.
      **settings: the fields of EngineConfig, under vLLM's names.

    Raises:
      ConfigError, CheckpointError: a setting or the weights do not work.
    """

    def __init__(self, model: str = "smollm2", *, progress: bool = True, **settings: Any):
        names = {field.name for field in dataclasses.fields(EngineConfig)}
        unknown = sorted(settings.keys() - names)
        if unknown:
            raise ConfigError(f"unknown setting {unknown[0]!r}; known: {', '.join(sorted(names))}")
        self._start(EngineConfig(model=model, **settings), progress)

    @classmethod
    def from_config(cls, config: EngineConfig, *, progress: bool = True) -> "LLM":
        """An LLM from an EngineConfig."""
        llm = cls.__new__(cls)
        llm._start(config, progress)
        return llm

    def _start(self, config: EngineConfig, progress: bool) -> None:
        self._engine = start_engine(config, progress)
        self._ids = itertools.count()
        self._seeds = random.Random(config.seed)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Generates for every prompt, batched as the engine sees fit.

        Args:
          prompts: one prompt or many; a prompt is a string, a list of token ids, or a dict with
            "prompt" or "prompt_token_ids" and perhaps "cache_salt".
          sampling_params: one for all, one per prompt, or None for the model's defaults.
          use_tqdm: show a bar with tokens per second.
          priority: for the "priority" scheduling policy, one for all or one per prompt.

        Returns:
          Outputs in the order of the prompts.

        Raises:
          ParameterError, PromptError, CapacityError: a request is not valid; none has run.
        """
        prompts = _as_list(prompts)
        params = self._params_for(sampling_params, len(prompts))
        priorities = _one_each("priority", priority, len(prompts))
        groups = [
            self._group(self._process(prompt), p, rank)
            for prompt, p, rank in zip(prompts, params, priorities, strict=True)
        ]
        bar = tqdm(
            total=len(groups),
            desc="generating",
            unit="prompt",
            disable=not use_tqdm,
            postfix="0 tokens/s",
        )
        began, num_tokens = time.monotonic(), 0
        for group, _, output in self._run(groups):
            num_tokens += len(output.new_token_ids)
            if group.num_unfinished == 0:
                bar.set_postfix_str(
                    f"{num_tokens / (time.monotonic() - began):.1f} tokens/s", refresh=False
                )
                bar.update()
        bar.close()
        return [_output(group) for group in groups]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation or many, through the model's chat template.

        Args:
          messages: a list of {"role", "content"}, or a list of such lists.
          **template_options: of `text.chat_template.encode_chat`.
        """
        conversations: Sequence[Any] = [messages] if _is_conversation(messages) else messages
        prompts = [
            {"prompt_token_ids": self.encode_chat(conversation, **template_options)}
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[str]:
        """Generates one completion and yields its text as it becomes certain.

        Closing the iterator ends the request.
        """
        params = self._params_for(sampling_params, 1)[0]
        if params.n != 1:
            raise ParameterError("n", params.n, "must be 1 to stream")
        group = self._group(self._process(prompt), params, 0)
        for _, delta, _ in self._run([group]):
            if delta:
                yield delta

    def encode_chat(self, messages: Messages, **template_options: Any) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn."""
        return encode_chat(self.get_tokenizer(), list(messages), **template_options)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
          ConfigError: the engine was started with skip_tokenizer_init.
        """
        if self._engine.tokenizer is None:
            raise ConfigError("skip_tokenizer_init=True: there is no tokenizer")
        return self._engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own defaults, from its generation_config.json."""
        source = self._engine.generation_config
        found = {key: source[key] for key in _GENERATION_KEYS if source.get(key) is not None}
        if source.get("do_sample") is False:
            found = {"temperature": 0.0}
        if source.get("max_new_tokens"):
            found["max_tokens"] = source["max_new_tokens"]
        return SamplingParams(**found)

    def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes; False while requests are running."""
        return self._engine.core.reset_prefix_cache()

    def _process(self, prompt: Prompt) -> ProcessedPrompt:
        return process_prompt(
            prompt,
            self._engine.tokenizer,
            max_model_len=self._engine.scheduler_config.max_model_len,
            vocab_size=self._engine.model_config.vocab_size,
        )

    def _params_for(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        chosen = self.get_default_sampling_params() if params is None else params
        vocab_size = self._engine.model_config.vocab_size
        listed = _one_each("sampling_params", chosen, count)
        for item in listed:
            if not isinstance(item, SamplingParams):
                raise ParameterError("sampling_params", item, "must be SamplingParams")
            for token in item.stop_token_ids:
                if token >= vocab_size:
                    raise ParameterError(
                        "stop_token_ids", token, f"must be below the vocabulary size {vocab_size}"
                    )
        return listed

    def _group(self, prompt: ProcessedPrompt, params: SamplingParams, priority: int) -> _Group:
        engine = self._engine
        request_id = str(next(self._ids))
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        sequences = []
        for index in range(params.n):
            request = Request(
                request_id if params.n == 1 else f"{index}_{request_id}",
                prompt.token_ids,
                params,
                max_model_len=engine.scheduler_config.max_model_len,
                seed=seed + index,
                eos_token_ids=engine.eos_token_ids,
                priority=priority,
                cache_salt=prompt.cache_salt,
            )
            text = SequenceText(engine.tokenizer, prompt.token_ids, params)
            sequences.append(_Sequence(request, text, index))
        return _Group(request_id, prompt, sequences, params.n)

    def _run(self, groups: list[_Group]) -> Iterator[tuple[_Group, str, EngineOutput]]:
        """Runs all groups to their end; yields (group, new text, news) as it comes."""
        core = self._engine.core
        where = {s.request.request_id: (group, s) for group in groups for s in group.sequences}
        ids = list(where)
        clean = False
        try:
            for _, sequence in where.values():
                core.add(sequence.request)
            while where:
                for output in core.step():
                    group, sequence = where[output.request_id]
                    delta = _add_text(sequence, output)
                    if output.finish_reason is not None:
                        del where[output.request_id]
                        group.num_unfinished -= 1
                        group.finished_time = time.monotonic()
                    yield group, delta, output
            clean = True
        except (GeneratorExit, CapacityError):
            core.abort(ids)
            clean = True
            raise
        finally:
            if not clean:
                # The interrupt may have come between the host's and the device's half of a step.
                core.reset()


def _add_text(sequence: _Sequence, output: EngineOutput) -> str:
    ids = output.new_token_ids
    if output.finish_reason is FinishReason.STOP:
        # The token that ends the output is no part of its text.
        ids = ids[:-1]
    delta = sequence.text.append(ids)
    return delta + sequence.text.finish() if output.finish_reason is not None else delta


def _output(group: _Group) -> RequestOutput:
    first = group.sequences[0].request
    metrics = RequestMetrics(
        first.arrival_time,
        first.first_scheduled_time,
        min((s.request.first_token_time or 0.0) for s in group.sequences),
        group.finished_time,
    )
    return RequestOutput(
        request_id=group.request_id,
        prompt=group.prompt.prompt_text,
        prompt_token_ids=group.prompt.token_ids,
        outputs=[
            CompletionOutput(
                index=s.index,
                text=s.text.text,
                token_ids=s.request.output_token_ids,
                finish_reason=s.request.finish_reason,
                stop_reason=s.request.stop_reason,
            )
            for s in group.sequences
        ],
        finished=group.num_unfinished == 0,
        num_cached_tokens=first.num_cached_tokens,
        metrics=metrics,
    )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt as a list of one; a non-empty list of ints is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    listed: list[Any] = list(prompts)
    if listed and all(isinstance(item, int) for item in listed):
        return [listed]
    return listed


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    if isinstance(value, (list, tuple)):
        if len(value) != count:
            raise ParameterError(name, f"{len(value)} items", f"one, or one per prompt ({count})")
        return list(value)
    return [value] * count


def _is_conversation(messages: Any) -> bool:
    return bool(messages) and isinstance(messages[0], Mapping)
