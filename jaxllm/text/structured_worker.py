"""The process that tries grammars first: it may be killed, or die, without harm to the engine.

It reads frames (4 bytes of length, little endian, then that many bytes) from standard input: JSON
of the limits, the packed token table, then grammars. It answers an empty frame when ready, and for
each grammar a frame with what is wrong with it, empty if nothing is. It ends with its input.
"""

import dataclasses
import json
import random
import struct
import sys
import time
from typing import BinaryIO

import llguidance

from jaxllm.text.structured_library import (
    COMPILE_STACK_BYTES,
    GrammarError,
    GrammarLimits,
    TokenTable,
    compile_matcher,
    library_tokenizer,
    message_of,
    with_stack,
)

_TRIED_TOKENS = 16
# Masks are computed in threads with small stacks; a grammar must not need more.
_MASK_STACK_BYTES = 2 * 2**20
_HEAD = struct.Struct("<I")


def pack_frame(data: bytes) -> bytes:
    return _HEAD.pack(len(data)) + data


def start_frames(table: TokenTable, limits: GrammarLimits) -> bytes:
    """What the process must be told before the first grammar."""
    return pack_frame(json.dumps(dataclasses.asdict(limits)).encode()) + pack_frame(table.pack())


def main() -> None:
    incoming, outgoing = sys.stdin.buffer, sys.stdout.buffer
    limits = GrammarLimits(**json.loads(_read_frame(incoming)))
    _limit_memory(limits.memory_bytes)
    tokenizer = library_tokenizer(TokenTable.unpack(_read_frame(incoming)))
    eos_ids = frozenset(tokenizer.eos_tokens)
    _write_frame(outgoing, b"")
    while True:
        text = _read_frame(incoming).decode()
        _write_frame(outgoing, _problem(tokenizer, text, limits, eos_ids).encode())


def _problem(
    tokenizer: llguidance.LLTokenizer, text: str, limits: GrammarLimits, eos_ids: frozenset[int]
) -> str:
    try:
        matcher = compile_matcher(tokenizer, text, limits)
    except GrammarError as error:
        return str(error)
    answer: str = with_stack(
        _MASK_STACK_BYTES, lambda: _follow(matcher, eos_ids, limits.step_seconds)
    )
    return answer


def _follow(matcher: llguidance.LLMatcher, eos_ids: frozenset[int], step_seconds: float) -> str:
    """Follow the grammar for a few tokens drawn at random, and watch what they cost."""
    draw = random.Random(0)
    for _ in range(_TRIED_TOKENS):
        start = time.thread_time()
        token = _allowed_token(matcher.compute_bitmask(), eos_ids, draw)
        if not matcher.is_error() and token is not None:
            matcher.consume_token(token)
        seconds = time.thread_time() - start
        if matcher.is_error():
            return message_of(matcher)
        if seconds > step_seconds:
            return f"one token takes {seconds:.2f} s; at most {step_seconds:g} s are allowed"
        if token is None or matcher.is_stopped():
            return ""
    return ""


def _allowed_token(mask: bytes, eos_ids: frozenset[int], draw: random.Random) -> int | None:
    """One of the tokens that a mask allows and that does not end the output."""
    offset = draw.randrange(len(mask))
    for i in range(len(mask)):
        index = (offset + i) % len(mask)
        if byte := mask[index]:
            bits = [8 * index + bit for bit in range(8) if byte >> bit & 1]
            if others := [token for token in bits if token not in eos_ids]:
                return draw.choice(others)
    return None


def _limit_memory(size: int) -> None:
    try:
        import resource
    except ImportError:
        return
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    # Stacks count as data even where they are never touched.
    wanted = size + COMPILE_STACK_BYTES + _MASK_STACK_BYTES
    if hard == resource.RLIM_INFINITY or hard > wanted:
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))


def _read_frame(stream: BinaryIO) -> bytes:
    return _read(stream, _HEAD.unpack(_read(stream, _HEAD.size))[0])


def _read(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        sys.exit(0)
    return data


def _write_frame(stream: BinaryIO, data: bytes) -> None:
    stream.write(pack_frame(data))
    stream.flush()


if __name__ == "__main__":
    main()
