"""A compiled grammar, and where one output stands in it."""

import time
from collections.abc import Sequence

import llguidance
import numpy as np

from jaxllm.text.structured_library import (
    GrammarError,
    GrammarLimits,
    TokenTable,
    compile_matcher,
    library_tokenizer,
    message_of,
)

# The automata of a grammar are shared by its states and only grow; so it is compiled anew after a
# while, and a state whose automata are full gets its own, where that is fast.
_TOKENS_BEFORE_RENEWAL = 100_000
_MAX_REBUILD_SECONDS = 0.05


class Vocabulary:
    """What all grammars of a compiler share.

    `mask_threads` is the number of threads that compute masks, None for 80 % of the CPUs.
    """

    def __init__(self, table: TokenTable, mask_threads: int | None = None):
        self.library = library_tokenizer(table)
        self._masks = llguidance.LLExecutor(mask_threads)
        self.size = len(table.tokens)
        self.mask_words = -(-self.size // 32)
        self.eos_ids = frozenset(table.eos_ids)
        self._is_token = bytes(map(bool, table.tokens))
        self._known = _bits([i for i, is_token in enumerate(self._is_token) if is_token], self.size)
        self._not_eos = ~_bits(list(table.eos_ids), self.size)

    def is_token(self, token_id: int) -> bool:
        """Whether the id is one of the vocabulary's; the library takes others for empty text."""
        return 0 <= token_id < self.size and self._is_token[token_id] == 1

    def fill_masks(
        self, states: "Sequence[GrammarState]", rows: Sequence[int], out: np.ndarray
    ) -> dict[int, GrammarError]:
        """See `GrammarCompiler.fill_masks`."""
        check_masks(out, 2, self.mask_words)
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


def check_masks(out: np.ndarray, dimensions: int, words: int) -> None:
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


class Grammar:
    """A compiled constraint. Its states share the automata that were built so far.

    `compile_seconds` is how long it took to compile.
    """

    def __init__(self, vocabulary: Vocabulary, text: str, limits: GrammarLimits, *, strict: bool):
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

    @property
    def filler(self) -> Vocabulary:
        """What computes the masks of this and other states at once."""
        return self._grammar._vocabulary

    def fill_mask(self, out: np.ndarray) -> None:
        """Write which tokens may follow to `out` (int32[W], contiguous).

        Raises `GrammarError`; the mask then allows nothing.
        """
        check_masks(out, 1, self._grammar._vocabulary.mask_words)
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
        # A matcher that failed has stopped too, but nothing is complete.
        stopped = self._error is None and self._matcher.is_stopped()
        return stopped and not self._matcher.is_error()

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
