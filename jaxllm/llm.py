"""LLM: offline generation in the caller's process."""

import dataclasses
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from jaxllm.beam_search import BeamSearchOutput, BeamSearchParams, search_beams
from jaxllm.config import EngineConfig
from jaxllm.engine.step_plan import EngineOutput
from jaxllm.errors import AsleepError, CapacityError, ConfigError
from jaxllm.execution.parameters import FunctionalModel, Params
from jaxllm.group_factory import GroupFactory, as_list
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.scoring import Score, score_continuation
from jaxllm.sequence_group import Sequence as Sample
from jaxllm.sequence_group import SequenceGroup
from jaxllm.startup import start_engine, training_model
from jaxllm.text.chat_template import encode_chat
from jaxllm.text.input import Prompt
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.weights import Running, WeightControl

type Messages = Sequence[Mapping[str, Any]]


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
        self._control = WeightControl(self._engine)
        self._model: FunctionalModel | None = None
        self._factory = GroupFactory(self._engine)
        # News that came of something else than a step.
        self._news: list[EngineOutput] = []

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
          ParameterError, PromptError, GrammarError, CapacityError: a request is not valid; none
            has run.
          AsleepError: see `sleep`.
        """
        groups = self._groups(prompts, sampling_params, priority)
        bar = tqdm(
            total=len(groups),
            desc="generating",
            unit="prompt",
            disable=not use_tqdm,
            postfix="0 tokens/s",
        )
        began, num_tokens = time.monotonic(), 0
        for group, _, _, output in self._run(groups):
            num_tokens += len(output.new_token_ids)
            if group.finished:
                rate = num_tokens / (time.monotonic() - began)
                bar.set_postfix_str(f"{rate:.1f} tokens/s", refresh=False)
                bar.update()
        bar.close()
        return [group.output() for group in groups]

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
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> Iterator[RequestOutput]:
        """Generates like `generate`, and yields outputs as they grow.

        Each output belongs to the request of its request_id, which counts up in the order of the
        prompts. `output_kind` of the parameters says what it holds: everything so far, what is new,
        or only the finished whole. Closing the iterator ends all its requests.
        """
        for group, sample, delta, news in self._run(
            self._groups(prompts, sampling_params, priority)
        ):
            output = group.update(sample, delta, news)
            if output is not None:
                yield output

    def score(self, prompt: Prompt, continuation: str | Sequence[int]) -> Score:
        """Log probabilities of a continuation after a prompt, without sampling it.

        Text is tokenised in two parts, so that the border lies where it is given.
        """
        return score_continuation(self, self._factory.process(prompt), continuation)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """The most probable continuations of each prompt by beam search."""
        return search_beams(self, [self._factory.process(p) for p in as_list(prompts)], params)

    def encode_chat(self, messages: Messages, **template_options: Any) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn."""
        return encode_chat(self.get_tokenizer(), list(messages), **template_options)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
          ConfigError: the engine was started with skip_tokenizer_init.
        """
        return self._factory.tokenizer

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every id that ends an output."""
        return self._engine.eos_token_ids

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own defaults, from its generation_config.json."""
        return self._factory.default_params()

    def get_metrics(self) -> dict[str, float]:
        """Counters since the start, and the present state of the pool and the queues."""
        scheduler = self._engine.core.scheduler
        return {
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": len(scheduler.waiting),
            "kv_cache_usage_perc": scheduler.pool.usage,
            "prefix_cache_queries": scheduler.stats.prefix_queries,
            "prefix_cache_hits": scheduler.stats.prefix_hits,
            "num_preemptions": scheduler.stats.num_preemptions,
        }

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forgets cached prefixes; False while requests are running, unless they may be preempted
        and recomputed."""
        return self._engine.core.reset_prefix_cache(reset_running_requests)

    def abort(self, request_ids: str | Sequence[str]) -> None:
        """Ends running requests of a stream; their last output says "abort"."""
        named = {request_ids} if isinstance(request_ids, str) else {*request_ids}
        core = self._engine.core
        # The samples of request "7" are the requests "0_7", "1_7" and so on.
        ids = [key for key in core.scheduler.requests if named & {key, key.partition("_")[2]}]
        self._news += core.abort(ids)

    @property
    def params(self) -> Params:
        """The weights the engine runs with: the arrays themselves, by the checkpoint's names.

        A flat dict in the checkpoint's [out, in] layout, such as
        {"model.layers.0.self_attn.q_proj.weight": [H * D, hidden], ...}, on the engine's mesh.
        Start training from it, but never donate these arrays: the engine reads them.

        Raises:
          AsleepError: they are not on the device.
        """
        return self._control.params

    @property
    def model(self) -> FunctionalModel:
        """The network as differentiable functions of `params`: `apply`, `token_logprobs`, and
        `module` for the Flax module."""
        if self._model is None:
            self._model = training_model(self._engine)
        return self._model

    def update_weights(
        self, weights: Any, *, copy: bool = True, running: Running = "refuse"
    ) -> None:
        """Puts new weights in place; nothing compiles, and the prefix cache is dropped.

        Args:
          weights: a dict as `params` gives it, a nested one, a Flax NNX module or its state, or a
            folder, hub id or file that `LLM` would load. Floats of another dtype are cast to the
            engine's, arrays elsewhere are moved to its mesh.
          copy: the engine takes copies, and the trainer may donate its arrays. False shares those
            that fit as they are: no copy is made, but they must stay alive and unchanged.
          running: what becomes of unfinished requests of a `stream`: "refuse" raises, "abort" ends
            them, "recompute" goes on with the tokens they have and K/V of the new weights.

        Raises:
          WeightsError, CheckpointError: they do not fit; each leaf at fault is named, with what it
            is and what is expected. The engine keeps the weights it has.
          BusyError: requests are unfinished and `running` is "refuse".
        """
        self._news += self._control.update(weights, copy=copy, running=running)

    def sleep(self, level: int = 1, *, running: Running = "refuse") -> None:
        """Gives device memory back, for a trainer: the KV pool, and the weights.

        Args:
          level: 1 moves the weights to host memory, from where `wake_up` brings them back; 2
            discards them, and `update_weights` must bring new ones.
          running: as for `update_weights`; "recompute" resumes requests after the wake-up.

        Raises:
          ParameterError: there is no such level.
          BusyError: requests are unfinished and `running` is "refuse".
        """
        self._news += self._control.sleep(level, running=running)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Ends the sleep: "weights" come back from the host, the "kv_cache" is allocated anew.

        Args:
          tags: one of the two first, to keep memory for an update between; None for both.

        Raises:
          ParameterError: a tag is unknown.
        """
        self._control.wake_up(tags)

    @property
    def is_sleeping(self) -> bool:
        """True while weights or KV pool are not on the device, when requests raise AsleepError."""
        return self._control.is_sleeping

    def _groups(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int],
    ) -> list[SequenceGroup]:
        """Checked requests; nothing is queued yet."""
        self._control.check_awake()
        return self._factory.groups(prompts, sampling_params, priority)

    def _run(
        self, groups: list[SequenceGroup]
    ) -> Iterator[tuple[SequenceGroup, Sample, str, EngineOutput]]:
        """Runs all groups to their end; yields (group, sample, new text, news) as it comes."""
        core = self._engine.core
        where = {s.request.request_id: (group, s) for group in groups for s in group.sequences}
        ids = list(where)
        clean = False
        try:
            for _, sample in where.values():
                core.add(sample.request)
            while where:
                if core.has_unfinished:
                    self._control.check_awake()
                news, self._news = [*self._news, *core.step()], []
                for output in news:
                    if output.request_id not in where:
                        continue
                    group, sample = where[output.request_id]
                    delta = group.take(sample, output)
                    if sample.finished:
                        del where[output.request_id]
                        core.finish_early(sample.request)
                    yield group, sample, delta, output
            clean = True
        except (GeneratorExit, CapacityError, AsleepError):
            core.abort(ids)
            clean = True
            raise
        finally:
            if not clean:
                # The interrupt may have come between the host's and the device's half of a step.
                core.reset()


def _is_conversation(messages: Any) -> bool:
    return bool(messages) and isinstance(messages[0], Mapping)
