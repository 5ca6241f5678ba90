"""From an Add command to the engine's Request, with its bad words and its grammar."""

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from jaxllm.engine.request import Request
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.bad_words import bad_word_ids
from serving.engine.messages import Add, unpack_params

if TYPE_CHECKING:
    from jaxllm.text.structured import GrammarCompiler


class RequestFactory:
    """Makes requests of one started engine."""

    def __init__(self, engine: Any):
        self._engine = engine
        self._grammars: GrammarCompiler | None = None

    def params(self, command: Add) -> SamplingParams:
        return unpack_params(command.params)

    def compile(self, params: SamplingParams) -> "Future[Any] | None":
        """The grammar of a request on its way, None for one without.

        Raises:
          GrammarError: there are no grammars with this tokenizer.
          ParameterError: there is no tokenizer.
        """
        spec = params.structured_outputs
        if spec is None:
            return None
        if self._grammars is None:
            self._grammars = self._compiler()
        return self._grammars.compile_later(spec)

    def make(self, command: Add, params: SamplingParams, grammar: Any) -> Request:
        engine = self._engine
        return Request(
            command.request_id,
            command.prompt_token_ids,
            params,
            max_model_len=engine.scheduler_config.max_model_len,
            seed=command.seed,
            eos_token_ids=engine.eos_token_ids,
            priority=command.priority,
            cache_salt=command.cache_salt,
            arrival_time=command.arrival_time,
            bad_word_ids=bad_word_ids(engine.tokenizer, params.bad_words or ()),
            grammar=None if grammar is None else grammar.new_state(),
        )

    def _compiler(self) -> "GrammarCompiler":
        from jaxllm.errors import ParameterError
        from jaxllm.text.structured import GrammarCompiler

        engine = self._engine
        if engine.tokenizer is None:
            raise ParameterError("structured_outputs", "given", "needs a tokenizer")
        return GrammarCompiler(
            engine.tokenizer, engine.model_config.vocab_size, engine.eos_token_ids
        )
