"""GroupFactory: from prompts and parameters, as a caller of LLM gives them, to checked requests."""

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxllm.errors import ConfigError, ParameterError
from jaxllm.sampling_params import SamplingParams, check_against_model, sampling_defaults
from jaxllm.sequence_group import SequenceGroup
from jaxllm.startup import Engine
from jaxllm.text.input import ProcessedPrompt, Prompt, process_prompt
from jaxllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxllm.text.structured import GrammarCompiler


class GroupFactory:
    """Makes SequenceGroups for one engine; it queues nothing."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._ids = itertools.count()
        self._seeds = random.Random(engine.config.seed)
        self._grammars: GrammarCompiler | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's; ConfigError if it was started with skip_tokenizer_init."""
        if self._engine.tokenizer is None:
            raise ConfigError("skip_tokenizer_init=True: there is no tokenizer")
        return self._engine.tokenizer

    def default_params(self) -> SamplingParams:
        """The model's own defaults, from its generation_config.json."""
        return SamplingParams(**sampling_defaults(self._engine.generation_config))

    def process(self, prompt: Prompt, truncate: int | None = None) -> ProcessedPrompt:
        """Token ids of a prompt that fits the model.

        Args:
          truncate: keep only this many tokens, the last ones.

        Raises:
          PromptError: it does not fit.
        """
        return process_prompt(
            prompt,
            self._engine.tokenizer,
            max_model_len=self._engine.scheduler_config.max_model_len,
            vocab_size=self._engine.model_config.vocab_size,
            truncate_prompt_tokens=truncate,
        )

    def groups(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int],
    ) -> list[SequenceGroup]:
        """A group per prompt; see `LLM.generate` for the arguments and errors."""
        listed = as_list(prompts)
        chosen = self.default_params() if sampling_params is None else sampling_params
        params = _one_each("sampling_params", chosen, len(listed))
        ranks = _one_each("priority", priority, len(listed))
        return [
            self._group(prompt, p, rank)
            for prompt, p, rank in zip(listed, params, ranks, strict=True)
        ]

    def _group(self, prompt: Prompt, params: SamplingParams, priority: int) -> SequenceGroup:
        engine = self._engine
        if not isinstance(params, SamplingParams):
            raise ParameterError("sampling_params", params, "must be SamplingParams")
        processed = self.process(prompt, params.truncate_prompt_tokens)
        max_model_len = engine.scheduler_config.max_model_len
        check_against_model(
            params,
            engine.model_config.vocab_size,
            engine.config.max_logprobs,
            max_model_len - len(processed.token_ids),
        )
        grammar = None
        if params.structured_outputs is not None:
            grammar = self._grammar_compiler().compile(params.structured_outputs)
        return SequenceGroup(
            str(next(self._ids)),
            processed,
            params,
            engine.tokenizer,
            max_model_len=max_model_len,
            eos_token_ids=engine.eos_token_ids,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            priority=priority,
            new_grammar=None if grammar is None else grammar.new_state,
        )

    def _grammar_compiler(self) -> "GrammarCompiler":
        if self._grammars is None:
            from jaxllm.text.structured import GrammarCompiler

            self._grammars = GrammarCompiler(
                self.tokenizer, self._engine.model_config.vocab_size, self._engine.eos_token_ids
            )
        return self._grammars


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
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
