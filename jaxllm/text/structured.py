"""Structured output: which tokens keep the text of an output within its constraint.

    compiler = GrammarCompiler(tokenizer, vocab_size, eos_token_ids)
    grammar = compiler.compile(StructuredOutputs(regex="[0-9]+"))
    state = grammar.new_state()
    state.fill_mask(mask)       # int32[W], W = ceil(V / 32): bit i of word w is token 32 * w + i
    state.accept(token_id)

The parser is the llguidance library: an Earley parser over lexemes whose automata are built as they
are needed (https://github.com/guidance-ai/llguidance). A mask says for each token whether the text
with it can still become one that satisfies the constraint; end tokens are allowed exactly where the
text satisfies it already.
"""

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from jaxllm.structured_outputs import StructuredOutputs
from jaxllm.text.structured_check import GrammarChecker
from jaxllm.text.structured_grammar import Grammar, GrammarState, Vocabulary
from jaxllm.text.structured_library import GrammarError, GrammarLimits, table_of
from jaxllm.text.structured_spec import grammar_text, is_gbnf, special_token_names
from jaxllm.text.token_bytes import Joining
from jaxllm.text.tokenizer import Tokenizer

__all__ = ["Grammar", "GrammarCompiler", "GrammarError", "GrammarLimits", "GrammarState"]


class GrammarCompiler:
    """Compiles constraints for one vocabulary, and computes masks for many states at once.

    Thread-safe. The `cache_size` most recently used grammars are kept, and so are refusals.
    A constraint is first compiled in another process under a time limit (`GrammarLimits`), then
    here. `mask_threads` is the number of threads that compute masks, None for 80 % of the CPUs.

    Raises `GrammarError` where a tokenizer is neither byte-level nor SentencePiece-like: what its
    tokens stand for is then known only in their context.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Collection[int],
        *,
        limits: GrammarLimits | None = None,
        cache_size: int = 64,
        mask_threads: int | None = None,
    ):
        if tokenizer.decoding.joining is Joining.OTHER:
            raise GrammarError(
                f"structured outputs are not supported with the tokenizer of {tokenizer.name}: "
                "it is neither byte-level nor SentencePiece-like"
            )
        if cache_size < 1:
            raise ValueError(f"cache_size={cache_size}: must be at least 1")
        self.vocab_size = vocab_size
        self.mask_words = -(-vocab_size // 32)
        self.limits = limits or GrammarLimits()
        self._table = table_of(
            tokenizer.token_to_bytes, vocab_size, tokenizer.special_ids, eos_token_ids
        )
        self._eos_names = frozenset(
            tokenizer.token_to_bytes(token_id).decode(errors="replace")
            for token_id in self._table.eos_ids
        )
        self._vocabulary = Vocabulary(self._table, mask_threads)
        self._checker = GrammarChecker(self._table, self.limits)
        self._cache: OrderedDict[StructuredOutputs, Grammar | GrammarError] = OrderedDict()
        self._cache_size = cache_size
        self._cache_lock = threading.Lock()
        self._compile_lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None

    def compile(self, spec: StructuredOutputs) -> Grammar:
        """The grammar of a constraint; at once where it is known, else within the time limit.

        Compilations wait for each other. Raises `GrammarError` with the library's message.
        """
        found = self._cached(spec)
        if found is None:
            with self._compile_lock:
                found = self._cached(spec)
                if found is None:
                    found = self._compiled(spec)
                    self._keep(spec, found)
        if isinstance(found, GrammarError):
            raise GrammarError(str(found))
        return found

    def compile_later(self, spec: StructuredOutputs) -> Future[Grammar]:
        """`compile` in a thread of its own, done at once where the answer is known."""
        found = self._cached(spec)
        if found is None:
            with self._cache_lock:
                if self._thread is None:
                    self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
            return self._thread.submit(self.compile, spec)
        future: Future[Grammar] = Future()
        if isinstance(found, GrammarError):
            future.set_exception(GrammarError(str(found)))
        else:
            future.set_result(found)
        return future

    def fill_masks(
        self, states: Sequence[GrammarState], rows: Sequence[int], out: np.ndarray
    ) -> dict[int, GrammarError]:
        """Write the mask of `states[i]` to row `rows[i]` of `out` (int32[R, W], C-contiguous).

        The states are computed in parallel threads that do not hold the interpreter; each may occur
        once. The result has the error of each row that failed; its mask allows nothing.
        """
        return self._vocabulary.fill_masks(states, rows, out)

    def close(self) -> None:
        """End the compiling process and thread; grammars go on working."""
        self._checker.close()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _compiled(self, spec: StructuredOutputs) -> Grammar | GrammarError:
        try:
            names = self._special_tokens(spec)
            text = grammar_text(spec)
            self._checker.check(text)
            return Grammar(self._vocabulary, text, self.limits, strict=names is not None)
        except GrammarError as error:
            return error
        except ValueError as error:
            return GrammarError(str(error))

    def _special_tokens(self, spec: StructuredOutputs) -> list[str] | None:
        """The special tokens that a Lark grammar names, None for other constraints."""
        if spec.grammar is None or is_gbnf(spec.grammar):
            return None
        names = special_token_names(spec.grammar)
        for name in names:
            if f"<{name}>" in self._eos_names:
                raise GrammarError(
                    f"the grammar names <{name}>, which ends the output; an end token is allowed "
                    "wherever the grammar is complete, and nowhere else"
                )
        return names

    def _cached(self, spec: StructuredOutputs) -> Grammar | GrammarError | None:
        with self._cache_lock:
            found = self._cache.get(spec)
            if found is None:
                return None
            if isinstance(found, Grammar) and found._is_worn:
                del self._cache[spec]
                return None
            self._cache.move_to_end(spec)
            return found

    def _keep(self, spec: StructuredOutputs, found: Grammar | GrammarError) -> None:
        with self._cache_lock:
            self._cache[spec] = found
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
