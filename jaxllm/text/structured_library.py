"""The llguidance library behind few functions: limits, token table, compiling with a deep stack.

Everything that compiles a grammar goes through here, in the engine's process and in the process
that tries grammars first, so that both do exactly the same.
"""

import struct
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import llguidance

from jaxllm.text.errors import TextError

# The library recurses over references between rules and schemas; each of them takes a few
# kilobytes of stack, and texts of the allowed size hold tens of thousands.
COMPILE_STACK_BYTES = 512 * 2**20
# Its prefix tree has room for 1,023 steps.
_MAX_TOKEN_BYTES = 1000
_NO_TOKEN = 2**32 - 1
_MAX_MESSAGE_CHARACTERS = 2000
_DEAD_END = "NoExtensionBias"
_stack_size_lock = threading.Lock()


class GrammarError(TextError):
    """A constraint that cannot be compiled, or one that got too complex while it was followed."""


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What one grammar may cost.

    Attributes:
      compile_seconds: wall time to compile it and try its first tokens.
      step_seconds: CPU time of any of these first tokens.
      memory_bytes: what the process that tries it first may allocate, the token table included
        (Linux only).
      grammar_size: symbols in its productions.
      initial_lexer_fuel: work on its regular expressions when compiling; 50,000 take about 1 ms.
      step_lexer_fuel: the same for each token; 14,000 take about 1 ms.
      step_items: parser items for each token; 20,000 take about 1 ms.
      items_in_row: parser items after each lexeme: how ambiguous it may be.
      lexer_states: states of its terminals reached so far, 1-2 kB each.
    """

    compile_seconds: float = 10.0
    step_seconds: float = 0.25
    memory_bytes: int = 2**30
    grammar_size: int = 500_000
    initial_lexer_fuel: int = 1_000_000
    step_lexer_fuel: int = 200_000
    step_items: int = 50_000
    items_in_row: int = 1_000
    lexer_states: int = 50_000

    def of_library(self) -> llguidance.LLParserLimits:
        return llguidance.LLParserLimits(
            max_items_in_row=self.items_in_row,
            initial_lexer_fuel=self.initial_lexer_fuel,
            step_lexer_fuel=self.step_lexer_fuel,
            step_max_items=self.step_items,
            max_lexer_states=self.lexer_states,
            max_grammar_size=self.grammar_size,
            verbose_errors=False,
        )


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The bytes of each of V tokens (`b""` for those that are never allowed).

    `special_ids` stand for no text and are matched only by name; `eos_ids` end an output.
    """

    tokens: tuple[bytes, ...]
    special_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]

    def pack(self) -> bytes:
        """The table as bytes, for another process."""
        ids = (*self.special_ids, *self.eos_ids)
        counts = (len(self.tokens), len(self.special_ids), len(self.eos_ids))
        lengths = [len(token) for token in self.tokens]
        head = struct.pack(f"<3I{len(ids) + len(lengths)}I", *counts, *ids, *lengths)
        return head + b"".join(self.tokens)

    @classmethod
    def unpack(cls, data: bytes) -> "TokenTable":
        counts = struct.unpack_from("<3I", data)
        numbers = struct.unpack_from(f"<{sum(counts)}I", data, 12)
        size, special, _ = counts
        position = 12 + 4 * sum(counts)
        tokens = []
        for length in numbers[len(numbers) - size :]:
            tokens.append(data[position : position + length])
            position += length
        ids = numbers[: len(numbers) - size]
        return cls(tuple(tokens), ids[:special], ids[special:])


def table_of(
    token_bytes: Callable[[int], bytes],
    vocab_size: int,
    special_ids: frozenset[int],
    eos_ids: Collection[int],
) -> TokenTable:
    """The table of a vocabulary of `vocab_size` rows.

    End tokens count as special, so that their names never match as text in the middle of an output.
    """
    eos = tuple(token_id for token_id in sorted(set(eos_ids)) if 0 <= token_id < vocab_size)
    special = {token_id for token_id in special_ids if token_id < vocab_size} | set(eos)
    tokens = tuple(map(token_bytes, range(vocab_size)))
    return TokenTable(
        tuple(token if len(token) <= _MAX_TOKEN_BYTES else b"" for token in tokens),
        tuple(sorted(special)),
        eos,
    )


class _Vocabulary(llguidance.TokenizerWrapper):
    """A token table as the library wants it. Texts are never cut into tokens with it."""

    is_tokenizer_wrapper = True

    def __init__(self, table: TokenTable):
        self.bos_token_id = None
        self.tokens = list(table.tokens)
        self.special_token_ids = list(table.special_ids)
        self.eos_token_id = table.eos_ids[0] if table.eos_ids else _NO_TOKEN

    def __call__(self, s: str) -> list[int]:
        raise GrammarError(f"no canonical tokens exist for {s!r}")


def library_tokenizer(table: TokenTable) -> llguidance.LLTokenizer:
    """The table as a prefix tree; takes about 10 µs per token."""
    eos = list(table.eos_ids) or None
    return llguidance.LLTokenizer(_Vocabulary(table), eos_token=eos)


def compile_matcher(
    tokenizer: llguidance.LLTokenizer, text: str, limits: GrammarLimits
) -> llguidance.LLMatcher:
    """Compile the text of a grammar list; other threads run meanwhile.

    Raises `GrammarError` with the library's message.
    """
    matcher: llguidance.LLMatcher = with_stack(
        COMPILE_STACK_BYTES,
        lambda: llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits.of_library()),
    )
    if matcher.is_error():
        raise GrammarError(message_of(matcher))
    return matcher


def with_stack(stack_bytes: int, function: Callable[[], Any]) -> Any:
    """The result of `function`, run in a thread of its own with a stack of that size."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    with _stack_size_lock:
        before = threading.stack_size(stack_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return future.result()


def message_of(matcher: llguidance.LLMatcher) -> str:
    """Why a matcher failed."""
    text = matcher.get_error().removesuffix("<non-verbose/>").strip()
    if text == _DEAD_END:
        return "no token of the vocabulary can go on from here, and the text is not complete"
    text = text.partition("\n<backtrace>")[0]
    lines = [line for line in text.splitlines() if "%llguidance {" not in line]
    return "\n".join(lines).rstrip()[:_MAX_MESSAGE_CHARACTERS]
