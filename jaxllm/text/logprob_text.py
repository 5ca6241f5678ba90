"""Token strings and bytes for logprob entries.

The string of a token is the text that it completes: a token that ends inside a character shows only
the characters before that one, and the token with its last byte shows the character. So the strings
of the sampled tokens join to the output's text (special tokens shown), and their bytes to its
bytes.
"""

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import NamedTuple

from jaxllm.text.token_bytes import unfinished_bytes
from jaxllm.text.tokenizer import Tokenizer


class TokenText(NamedTuple):
    """`token` and `bytes` as in OpenAI's logprob entries."""

    token: str
    bytes: bytes

    @property
    def key(self) -> str:
        """A string that tells tokens apart that complete no character: `bytes:\\xf0\\x9f`."""
        if self.token or not self.bytes:
            return self.token
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes)


def describe_tokens(
    tokenizer: Tokenizer | None,
    candidates: Sequence[int],
    context: Sequence[int],
    *,
    as_token_ids: bool = False,
) -> list[TokenText]:
    """Strings and bytes of the candidate tokens at one position.

    `context` are the tokens before that position; only the last few are looked at. With
    `as_token_ids` the string is `token_id:<id>`, which no two tokens share. Without a tokenizer it
    is always that, and the bytes are empty.
    """
    if tokenizer is None:
        return [TokenText(token_id_string(token_id), b"") for token_id in candidates]
    tables = tokenizer.tables(skip_special_tokens=False)
    unfinished = b"" if as_token_ids else unfinished_bytes(tables.bytes, context)
    described = []
    for token_id in candidates:
        data = tables.bytes[token_id]
        if as_token_ids:
            text = token_id_string(token_id)
        elif unfinished or (whole := tables.texts[token_id]) is None:
            text, _ = utf_8_decode(unfinished + data, "replace", False)
        else:
            text = whole
        described.append(TokenText(text, data))
    return described


def token_id_string(token_id: int) -> str:
    """The form of a token that `return_tokens_as_token_ids` asks for."""
    return f"token_id:{token_id}"
