"""Helpers of the tests of structured output: masks as sets, walks that follow a mask."""

import random

import numpy as np

from jaxllm.structured_outputs import StructuredOutputs
from jaxllm.text.structured import GrammarCompiler, GrammarState
from jaxllm.text.tokenizer import Tokenizer


def allowed(state: GrammarState, compiler: GrammarCompiler) -> list[int]:
    """The token ids that the mask allows."""
    mask = np.full(compiler.mask_words, -1, np.int32)
    state.fill_mask(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return np.nonzero(bits)[0].tolist()


def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer, spec, text: str) -> bool:
    """Whether the text, written one byte token at a time, satisfies the constraint."""
    state = compiler.compile(spec).new_state()
    one_byte = {tokenizer.token_to_bytes(i): i for i in range(tokenizer.vocab_size)}
    return all(state.accept(one_byte[bytes([b])]) for b in text.encode()) and state.can_end


class Walker:
    """Draws outputs that follow a constraint, any allowed token with the same probability.

    After `hurry_after` tokens those that close something are preferred, so that it comes to an end.
    """

    def __init__(self, compiler: GrammarCompiler, tokenizer: Tokenizer, eos: int):
        self._compiler = compiler
        self._tokenizer = tokenizer
        self._eos = eos
        self._closing = {
            token
            for token in range(tokenizer.vocab_size)
            if tokenizer.token_to_bytes(token) in (b'"', b"}", b"]", b")", b'"}', b'"]')
        }

    def output(
        self, spec: StructuredOutputs, seed: int, hurry_after: int = 40, limit: int = 2000
    ) -> str:
        draw = random.Random(seed)
        state = self._compiler.compile(spec).new_state()
        text = b""
        for count in range(limit):
            tokens = allowed(state, self._compiler)
            may_end = self._eos in tokens
            assert state.can_end == may_end
            if may_end and (len(tokens) == 1 or count > hurry_after or draw.random() < 0.2):
                assert state.accept(self._eos)
                assert state.is_terminated
                return text.decode()
            if count > hurry_after and (closing := self._closing.intersection(tokens)):
                tokens = sorted(closing)
            while (token := draw.choice(tokens)) == self._eos:
                pass
            assert state.accept(token)
            text += self._tokenizer.token_to_bytes(token)
        raise AssertionError(f"no end after {limit} tokens: {text[:200]!r}")
