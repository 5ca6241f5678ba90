"""What each token stands for: its exact bytes, and how a tokenizer joins tokens into text.

Three ways to join are told apart, by the decoder of the `tokenizers` library:

- `BYTES` (byte-level BPE): a token is bytes written with GPT-2's 256 printable characters. The text
  is the concatenated bytes as UTF-8, each maximal invalid part replaced by U+FFFD.
- `PIECES` (SentencePiece BPE with byte fallback): a token is a piece of text with U+2581 for a
  space, or one byte `<0xNN>`. A run of byte tokens is decoded as a whole; if the run is not UTF-8,
  each of its bytes becomes U+FFFD. One leading space of the text is dropped where the vocabulary
  adds one.
- `OTHER`: anything else; only the library's own decode knows.
"""

import enum
import json
import re
from codecs import utf_8_decode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import tokenizers

from jaxllm.text.errors import PromptError

_SPACE = "▁"
_MAX_UTF8 = 4
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>", re.ASCII)
_PIECES_DECODER = [
    {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP_ONE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


class Joining(enum.Enum):
    BYTES = "byte-level"
    PIECES = "sentencepiece"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Decoding:
    """How tokens are joined, and whether one leading space of the whole text is dropped."""

    joining: Joining
    strip_leading_space: bool = False


def decoding_of(backend: tokenizers.Tokenizer) -> Decoding:
    """Recognise the decoder of `backend`."""
    decoder = backend.decoder
    if decoder is None:
        return Decoding(Joining.OTHER)
    steps = json.loads(decoder.__getstate__())
    steps = steps["decoders"] if steps.get("type") == "Sequence" else [steps]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return Decoding(Joining.BYTES)
    if steps[:3] == _PIECES_DECODER and steps[3:] in ([], [_STRIP_ONE]):
        return Decoding(Joining.PIECES, strip_leading_space=len(steps) == 4)
    return Decoding(Joining.OTHER)


@lru_cache(maxsize=1)
def byte_of_character() -> dict[str, int]:
    """GPT-2's reversible map from 256 printable characters to bytes.

    Printable Latin-1 bytes stand for themselves; the others take characters from U+0100 on, in
    order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


class ByteTable(dict[int, bytes]):
    """Token id -> bytes of that token, filled when first asked for.

    `b""` for the `skipped` ids and for ids without a token. Where the joining is `OTHER`, the bytes
    are the UTF-8 of the token decoded alone.
    """

    def __init__(self, backend: tokenizers.Tokenizer, decoding: Decoding, skipped: frozenset[int]):
        super().__init__()
        self._backend = backend
        self._joining = decoding.joining
        self.update(dict.fromkeys(skipped, b""))

    def __missing__(self, token_id: int) -> bytes:
        token = token_text(self._backend, token_id)
        self[token_id] = data = b"" if token is None else self._bytes(token, token_id)
        return data

    def _bytes(self, token: str, token_id: int) -> bytes:
        if self._joining is Joining.BYTES:
            table = byte_of_character()
            try:
                return bytes([table[character] for character in token])
            except KeyError:
                return token.encode()
        if self._joining is Joining.PIECES:
            piece = piece_of(token)
            return bytes([piece]) if isinstance(piece, int) else piece.encode()
        return self._backend.decode([token_id], skip_special_tokens=False).encode()


class TextTable(dict[int, str | None]):
    """Token id -> its bytes as text, None where they are not whole characters."""

    def __init__(self, byte_table: ByteTable):
        super().__init__()
        self._bytes = byte_table

    def __missing__(self, token_id: int) -> str | None:
        try:
            text: str | None = self._bytes[token_id].decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


class PieceTable(dict[int, str | int]):
    """Token id -> its text, or the value of the byte it stands for (`PIECES` joining only).

    `""` for the `skipped` ids and for ids without a token.
    """

    def __init__(self, backend: tokenizers.Tokenizer, skipped: frozenset[int]):
        super().__init__()
        self._backend = backend
        self.update(dict.fromkeys(skipped, ""))

    def __missing__(self, token_id: int) -> str | int:
        token = token_text(self._backend, token_id)
        self[token_id] = piece = "" if token is None else piece_of(token)
        return piece


class TokenTables:
    """The tables of one vocabulary, with the `skipped` ids standing for nothing."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        decoding: Decoding,
        skipped: frozenset[int] = frozenset(),
    ):
        self.bytes = ByteTable(backend, decoding, skipped)
        self.texts = TextTable(self.bytes)
        self.pieces = PieceTable(backend, skipped)


def piece_of(token: str) -> str | int:
    """The text of a SentencePiece token, or its value if it is a byte token."""
    if match := _BYTE_TOKEN.fullmatch(token):
        return int(match[1], 16)
    return token.replace(_SPACE, " ")


def token_text(backend: tokenizers.Tokenizer, token_id: int) -> str | None:
    """The vocabulary entry of `token_id`, None for an id without one. Refuses what is no id."""
    try:
        return backend.id_to_token(token_id)
    except (OverflowError, TypeError):
        raise PromptError(f"token id {token_id!r} is not an integer in [0, 2**32)") from None


def unfinished_bytes(table: ByteTable, token_ids: Sequence[int]) -> bytes:
    """The last bytes of the tokens that begin a UTF-8 character without ending it; at most 3."""
    tail = b""
    for token_id in reversed(token_ids):
        tail = table[token_id] + tail
        if len(tail) >= _MAX_UTF8:
            break
    return tail[utf_8_decode(tail, "replace", False)[1] :]
