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
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import llguidance
import numpy as np

from jaxllm.structured_outputs import StructuredOutputs
from jaxllm.text.structured_check import GrammarChecker
from jaxllm.text.structured_library import (
    GrammarError,
    GrammarLimits,
    TokenTable,
    compile_matcher,
    library_tokenizer,
    message_of,
    table_of,
)
from jaxllm.text.structured_spec import grammar_text, is_gbnf, special_token_names
from jaxllm.text.token_bytes import Joining
from jaxllm.text.tokenizer import Tokenizer

__all__ = ["Grammar", "GrammarCompiler", "GrammarError", "GrammarLimits", "GrammarState"]

# The automata of a grammar are shared by its states and only grow; so it is compiled anew after a
# while, and a state whose automata are full gets its own, where that is fast.
_TOKENS_BEFORE_RENEWAL = 100_000
_MAX_REBUILD_SECONDS = 0.05


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
        self._vocabulary = _Vocabulary(self._table)
        self._checker = GrammarChecker(self._table, self.limits)
        self._masks = llguidance.LLExecutor(mask_threads)
        self._cache: OrderedDict[StructuredOutputs, Grammar | GrammarError] = OrderedDict()
        self._cache_size = cache_size
        self._cache_lock = threading.Lock()
        self._compile_lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None

    def compile(self, spec: StructuredOutputs) -> "Grammar":
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

    def compile_later(self, spec: StructuredOutputs) -> "Future[Grammar]":
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
        self, states: Sequence["GrammarState"], rows: Sequence[int], out: np.ndarray
    ) -> dict[int, GrammarError]:
        """Write the mask of `states[i]` to row `rows[i]` of `out` (int32[R, W], C-contiguous).

        The states are computed in parallel threads that do not hold the interpreter; each may occur
        once. The result has the error of each row that failed; its mask allows nothing.
        """
        _check_masks(out, 2, self.mask_words)
        pairs = [
            (state._matcher, row)
            for state, row in zip(states, rows, strict=True)
            if state._error is None
        ]
        if pairs:
            self._masks.unsafe_compute_mask_ptr(
                pairs, out.ctypes.data, 4 * self.mask_words, len(out)
            )
        errors: dict[int, GrammarError] = {}
        for state, row in zip(states, rows, strict=True):
            try:
                state._finish_mask(out[row])
            except GrammarError as error:
                errors[row] = error
        return errors

    def close(self) -> None:
        """End the compiling process and thread; grammars go on working."""
        self._checker.close()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _compiled(self, spec: StructuredOutputs) -> "Grammar | GrammarError":
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

    def _cached(self, spec: StructuredOutputs) -> "Grammar | GrammarError | None":
        with self._cache_lock:
            found = self._cache.get(spec)
            if found is None:
                return None
            if isinstance(found, Grammar) and found._is_worn:
                del self._cache[spec]
                return None
            self._cache.move_to_end(spec)
            return found

    def _keep(self, spec: StructuredOutputs, found: "Grammar | GrammarError") -> None:
        with self._cache_lock:
            self._cache[spec] = found
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)


class Grammar:
    """A compiled constraint. Its states share the automata that were built so far.

    `compile_seconds` is how long it took to compile.
    """

    def __init__(
        self, vocabulary: "_Vocabulary", text: str, limits: GrammarLimits, *, strict: bool
    ):
        self._vocabulary = vocabulary
        self._text = text
        self._limits = limits
        self._strict = strict
        self._accepted = 0
        start = time.perf_counter()
        self._prototype = self._build()
        self.compile_seconds = time.perf_counter() - start

    def new_state(self) -> "GrammarState":
        """The state before the first token."""
        return GrammarState(self, self._prototype.deep_copy(), [])

    @property
    def _is_worn(self) -> bool:
        return self._accepted > _TOKENS_BEFORE_RENEWAL

    def _build(self) -> llguidance.LLMatcher:
        return compile_matcher(self._vocabulary.library, self._text, self._limits)

    def _replayed(self, tokens: list[int], message: str) -> llguidance.LLMatcher:
        """A matcher of its own automata, after `tokens`; `message` says why it is needed."""
        self._accepted = _TOKENS_BEFORE_RENEWAL + 1
        if self.compile_seconds > _MAX_REBUILD_SECONDS:
            raise GrammarError(message)
        matcher = self._build()
        if not matcher.consume_tokens(tokens):
            raise GrammarError(message_of(matcher))
        return matcher


class GrammarState:
    """Where one output stands in its grammar. For one thread at a time.

    A state that fails (its grammar got too complex, or no token can follow) raises `GrammarError`
    from then on; no other state is concerned.
    """

    __slots__ = ("_error", "_grammar", "_matcher", "_tokens")

    def __init__(self, grammar: Grammar, matcher: llguidance.LLMatcher, tokens: list[int]):
        self._grammar = grammar
        self._matcher = matcher
        self._tokens = tokens
        self._error: GrammarError | None = None

    def fill_mask(self, out: np.ndarray) -> None:
        """Write which tokens may follow to `out` (int32[W], contiguous).

        Raises `GrammarError`; the mask then allows nothing.
        """
        _check_masks(out, 1, self._grammar._vocabulary.mask_words)
        if self._error is None:
            self._matcher.unsafe_compute_mask_ptr(out.ctypes.data, out.nbytes)
        self._finish_mask(out)

    def accept(self, token_id: int) -> bool:
        """Go on with a token; False, and nothing changes, where it may not follow.

        Raises `GrammarError` where the grammar got too complex.
        """
        if self._error is not None:
            raise self._error
        vocabulary = self._grammar._vocabulary
        if not vocabulary.is_token(token_id):
            return False
        if token_id in vocabulary.eos_ids and self._matcher.is_stopped():
            return True
        if self._tried(token_id):
            self._tokens.append(token_id)
            self._grammar._accepted += 1
            return True
        return False

    @property
    def can_end(self) -> bool:
        """Whether the text satisfies the constraint as it is."""
        return self._error is None and self._matcher.is_accepting()

    @property
    def is_terminated(self) -> bool:
        """Whether the text is complete and nothing but an end token may follow, or one has."""
        return self._error is None and self._matcher.is_stopped()

    def copy(self) -> "GrammarState":
        """An independent state at the same place."""
        state = GrammarState(self._grammar, self._matcher.deep_copy(), list(self._tokens))
        state._error = self._error
        return state

    def _tried(self, token_id: int) -> bool:
        ends = token_id in self._grammar._vocabulary.eos_ids
        if self._grammar._strict and ends and not self._matcher.is_accepting():
            return False
        accepted = self._matcher.try_consume_tokens([token_id]) == 1
        if self._matcher.is_error():
            self._rebuild()
            accepted = self._matcher.try_consume_tokens([token_id]) == 1
            self._raise_if_failed()
        return accepted

    def _finish_mask(self, out: np.ndarray) -> None:
        """Check and complete what the library wrote to `out`."""
        try:
            if self._error is not None:
                raise self._error
            if self._matcher.is_error():
                self._rebuild()
                self._matcher.unsafe_compute_mask_ptr(out.ctypes.data, out.nbytes)
                self._raise_if_failed()
            if self._grammar._strict:
                self._grammar._vocabulary.keep_text(out, self._matcher.is_accepting())
                if not out.any():
                    self._fail("only an end token fits here, and the text is not complete")
        except GrammarError:
            out[:] = 0
            raise

    def _rebuild(self) -> None:
        """Replace a failed matcher: the automata that it shares may be full, or broken."""
        message = message_of(self._matcher)
        try:
            self._matcher = self._grammar._replayed(self._tokens, message)
        except GrammarError as error:
            self._fail(str(error))

    def _raise_if_failed(self) -> None:
        if self._matcher.is_error():
            self._fail(message_of(self._matcher))

    def _fail(self, message: str) -> None:
        self._error = GrammarError(message)
        raise self._error


class _Vocabulary:
    """What all grammars of a compiler share."""

    def __init__(self, table: TokenTable):
        self.library = library_tokenizer(table)
        self.size = len(table.tokens)
        self.mask_words = -(-self.size // 32)
        self.eos_ids = frozenset(table.eos_ids)
        self._is_token = bytes(map(bool, table.tokens))
        self._known = _bits([i for i, is_token in enumerate(self._is_token) if is_token], self.size)
        self._not_eos = ~_bits(list(table.eos_ids), self.size)

    def is_token(self, token_id: int) -> bool:
        """Whether the id is one of the vocabulary's; the library takes others for empty text."""
        return 0 <= token_id < self.size and self._is_token[token_id] == 1

    def keep_text(self, mask: np.ndarray, can_end: bool) -> None:
        """Remove what ranges of token ids in a grammar let in: rows without a token, end tokens."""
        mask &= self._known
        if not can_end:
            mask &= self._not_eos


def _bits(token_ids: list[int], size: int) -> np.ndarray:
    """A mask of these tokens: int32[ceil(size / 32)]."""
    bits = np.zeros(-(-size // 32) * 32, np.uint8)
    bits[token_ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _check_masks(out: np.ndarray, dimensions: int, words: int) -> None:
    if (
        out.dtype != np.int32
        or out.ndim != dimensions
        or out.shape[-1] != words
        or not out.flags.c_contiguous
        or not out.flags.writeable
    ):
        raise ValueError(
            f"masks must be contiguous int32 with {dimensions} dimensions and {words} words per "
            f"row, not {out.dtype}{list(out.shape)}"
        )
