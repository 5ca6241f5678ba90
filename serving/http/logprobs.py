"""Logprob rows as clients of completions and chats expect them."""

from collections.abc import Sequence
from typing import Any

from jaxllm.text.logprob_text import describe_tokens
from jaxllm.text.tokenizer import Tokenizer
from serving.engine.messages import LogprobRow

# JSON has no infinity.
FLOOR = -9999.0
# A character has at most four bytes, so no more tokens before a token matter to its text.
_CONTEXT = 8


class LogprobWriter:
    """Logprobs of one choice, token after token.

    Args:
      context: the tokens before the first one.
      top: how many alternatives were asked for.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        context: Sequence[int],
        top: int,
        as_token_ids: bool,
    ):
        self._tokenizer = tokenizer
        self._context = list(context[-_CONTEXT:])
        self._top = top
        self._as_token_ids = as_token_ids
        self._offset = 0

    def completion(
        self, rows: Sequence[LogprobRow | None], token_ids: Sequence[int]
    ) -> dict[str, Any]:
        """The object of /v1/completions; a row of None is the first token of a prompt."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, row in zip(token_ids, rows, strict=True):
            ids = [token_id] if row is None else row.token_ids
            texts = self._describe(ids)
            tokens.append(texts[0].token)
            offsets.append(self._offset)
            self._offset += len(texts[0].token)
            self._push(token_id)
            if row is None:
                values.append(None)
                tops.append(None)
                continue
            values.append(floored(row.logprobs[0]))
            top: dict[str, float] = {}
            for text, value in zip(texts, row.logprobs, strict=True):
                # Tokens that look alike: the first, which is the token itself, has the name.
                key = text.token or text.key
                if key in top:
                    key = byte_key(text.bytes)
                    if key in top:
                        continue
                top[key] = value if value > FLOOR else FLOOR
            tops.append(top)
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def chat(self, rows: Sequence[LogprobRow], token_ids: Sequence[int]) -> dict[str, Any]:
        """The object of /v1/chat/completions."""
        content = []
        for token_id, row in zip(token_ids, rows, strict=True):
            texts = self._describe(row.token_ids)
            entries: list[dict[str, Any]] = [
                {
                    "token": text.token,
                    "logprob": value if value > FLOOR else FLOOR,
                    "bytes": list(text.bytes),
                }
                for text, value in zip(texts, row.logprobs, strict=True)
            ]
            self._push(token_id)
            # The token is one of the most probable where the others do not fill the places.
            first = 0 if len(entries) - 1 < self._top else 1
            top = sorted(entries[first:], key=_logprob, reverse=True)
            content.append({**entries[0], "top_logprobs": top})
        return {"content": content}

    def _describe(self, ids: Sequence[int]) -> list[Any]:
        return describe_tokens(self._tokenizer, ids, self._context, as_token_ids=self._as_token_ids)

    def _push(self, token_id: int) -> None:
        self._context.append(token_id)
        del self._context[:-_CONTEXT]


def _logprob(entry: dict[str, Any]) -> float:
    value: float = entry["logprob"]
    return value


def prompt_logprobs(
    rows: Sequence[LogprobRow | None], prompt: Sequence[int], tokenizer: Tokenizer | None
) -> list[dict[str, Any] | None]:
    """The field `prompt_logprobs`: per prompt token, id -> {logprob, rank, decoded_token}."""
    found: list[dict[str, Any] | None] = []
    for place, row in enumerate(rows):
        if row is None:
            found.append(None)
            continue
        texts = describe_tokens(tokenizer, row.token_ids, prompt[max(0, place - _CONTEXT) : place])
        found.append(
            {
                str(token): {"logprob": floored(value), "rank": rank, "decoded_token": text.token}
                for token, value, rank, text in zip(
                    row.token_ids, row.logprobs, row.ranks, texts, strict=True
                )
            }
        )
    return found


def byte_key(data: bytes) -> str:
    """The name of a token in a dictionary where its text is taken."""
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def floored(value: float) -> float:
    """A finite logprob."""
    return value if value > FLOOR else FLOOR
