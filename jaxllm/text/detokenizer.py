"""Text of a growing list of tokens, delta by delta, in constant time per token.

The joined deltas are the text that follows the prompt, W - P, where P is the decode of the prompt
and W the decode of prompt and output together:

- if W starts with P, the rest of W;
- otherwise (the prompt ends inside a character that the output goes on with) the part of W that
  begins with the character the output's first byte takes part in.

With an empty prompt the joined deltas are the decode of the output. A delta holds only what no
later token can change: an unfinished character is kept back, and in a SentencePiece vocabulary so
is a run of byte tokens until another token ends it, because one invalid byte replaces the whole
run. `finish` releases what is left, with U+FFFD for what never became a character.
"""

from codecs import utf_8_decode
from collections.abc import Sequence

from jaxllm.text.token_bytes import Joining, unfinished_bytes
from jaxllm.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"

# Tokens of the prompt that a decoder of unknown kind is shown before the output.
_WINDOW_CONTEXT = 6
# Tokens that such a decoder may hold back for a U+FFFD at the end to become a character.
_WINDOW_HOLD = 8


class IncrementalDetokenizer:
    """Detokenizer of one output stream. Cheap to make; not shared between threads."""

    __slots__ = ("_stream",)

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ):
        self._stream: _Stream
        match tokenizer.decoding.joining:
            case Joining.BYTES:
                self._stream = _ByteStream(tokenizer, prompt_token_ids, skip_special_tokens)
            case Joining.PIECES:
                self._stream = _PieceStream(tokenizer, prompt_token_ids, skip_special_tokens)
            case Joining.OTHER:
                self._stream = _WindowStream(
                    tokenizer, prompt_token_ids, skip_special_tokens, spaces_between_special_tokens
                )

    def append(self, new_ids: Sequence[int]) -> str:
        """Take the next output tokens; return the text that became certain."""
        return self._stream.append(new_ids)

    def finish(self) -> str:
        """Return the text kept back. The output is over; nothing may be appended after this."""
        return self._stream.finish()


class _ByteStream:
    """Byte-level BPE: concatenated bytes, decoded as UTF-8 with replacement."""

    __slots__ = ("_after_prompt", "_bytes", "_pending", "_texts")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip: bool):
        tables = tokenizer.tables(skip)
        self._bytes = tables.bytes.__getitem__
        self._texts = tables.texts
        self._pending = unfinished_bytes(tables.bytes, prompt_token_ids)
        # Set while the pending bytes are the prompt's: its own decode shows them as U+FFFD.
        self._after_prompt = bool(self._pending)

    def append(self, new_ids: Sequence[int]) -> str:
        # Nearly every call brings one token of whole characters.
        if (
            len(new_ids) == 1
            and not self._pending
            and (whole := self._texts[new_ids[0]]) is not None
        ):
            return whole
        data = self._pending + b"".join(map(self._bytes, new_ids))
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return self._without_prompt(text) if self._after_prompt else text

    def finish(self) -> str:
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return self._without_prompt(text) if self._after_prompt else text

    def _without_prompt(self, text: str) -> str:
        if not text:
            return text
        self._after_prompt = False
        return text.removeprefix(_REPLACEMENT)


class _PieceStream:
    """SentencePiece BPE with byte fallback: pieces of text between runs of byte tokens."""

    __slots__ = ("_of_prompt", "_pieces", "_run", "_strip")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip: bool):
        self._pieces = tokenizer.tables(skip).pieces
        self._run = bytearray()
        # True until the first text, if the whole text loses one leading space.
        self._strip = tokenizer.decoding.strip_leading_space
        for token_id in reversed(prompt_token_ids):
            piece = self._pieces[token_id]
            if isinstance(piece, int):
                self._run.append(piece)
            elif piece:
                self._strip = False
                break
        self._run.reverse()
        # How many bytes of the open run are the prompt's.
        self._of_prompt = len(self._run)

    def append(self, new_ids: Sequence[int]) -> str:
        parts: list[str] = []
        for token_id in new_ids:
            piece = self._pieces[token_id]
            if isinstance(piece, int):
                self._run.append(piece)
            elif piece:
                if self._run:
                    parts.append(self._close_run())
                parts.append(self._stripped(piece) if self._strip else piece)
        return "".join(parts)

    def finish(self) -> str:
        return self._close_run() if self._run else ""

    def _close_run(self) -> str:
        data, of_prompt = bytes(self._run), self._of_prompt
        self._run.clear()
        self._of_prompt = 0
        text = _decode_run(data)
        if not of_prompt:
            return self._stripped(text) if self._strip else text
        self._strip = False
        prompt = data[:of_prompt]
        prompt_text = _decode_run(prompt)
        if text.startswith(prompt_text):
            return text[len(prompt_text) :]
        if _REPLACEMENT in text:
            return _REPLACEMENT * (len(data) - of_prompt)
        return text[len(utf_8_decode(prompt, "strict", False)[0]) :]

    def _stripped(self, text: str) -> str:
        self._strip = False
        return text.removeprefix(" ")


def _decode_run(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return _REPLACEMENT * len(data)


class _WindowStream:
    """Any other decoder: decode a short window with and without the new tokens, and compare.

    The window begins at a token whose text is already out, so that what a decoder does only at the
    start of a text (such as dropping a space) happens in both decodes. Skipped tokens never enter
    it.
    """

    __slots__ = ("_known", "_known_text", "_skipped", "_split", "_tokenizer", "_window")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        skip: bool,
        spaces_between_special_tokens: bool,
    ):
        special, none = tokenizer.special_ids, frozenset[int]()
        self._tokenizer = tokenizer
        self._skipped = special if skip else none
        # Special tokens between two of which there must be no space.
        self._split = none if spaces_between_special_tokens else special
        context: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if token_id not in self._skipped:
                context.append(token_id)
                if len(context) == _WINDOW_CONTEXT:
                    break
        self._window = context[::-1]
        self._known = len(self._window)
        self._known_text = self._decode()

    def append(self, new_ids: Sequence[int]) -> str:
        return "".join(self._append_one(i) for i in new_ids if i not in self._skipped)

    def finish(self) -> str:
        return self._release(self._decode())

    def _append_one(self, token_id: int) -> str:
        before = ""
        if self._window and token_id in self._split and self._window[-1] in self._split:
            before = self.finish()
            self._window, self._known, self._known_text = [], 0, ""
        self._window.append(token_id)
        text = self._decode()
        if len(self._window) - self._known < _WINDOW_HOLD and (
            len(text) <= len(self._known_text) or text.endswith(_REPLACEMENT)
        ):
            return before
        return before + self._release(text)

    def _release(self, text: str) -> str:
        delta = text[len(self._known_text) :]
        self._window = self._window[self._known :]
        self._known = len(self._window)
        self._known_text = self._decode()
        return delta

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)


_Stream = _ByteStream | _PieceStream | _WindowStream
