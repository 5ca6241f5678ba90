"""The door of the text side: any form of prompt becomes checked token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm.text.errors import PromptError
from jaxllm.text.tokenizer import Tokenizer

MAX_CACHE_SALT = 128
_SALT_FORBIDDEN = "@/\\\0"
_FORMS = "a string, a list of token ids, {'prompt': str} or {'prompt_token_ids': list[int]}"

Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ProcessedPrompt:
    """A prompt the engine can take: 1 <= len(token_ids) < max_model_len, every id in the
    vocabulary.

    `prompt_text` is None if the caller gave token ids. Requests share cached prefixes only with
    requests of the same `cache_salt`.
    """

    prompt_text: str | None
    token_ids: list[int]
    cache_salt: str | None


def process_prompt(
    prompt: Prompt,
    tokenizer: Tokenizer | None,
    *,
    max_model_len: int,
    vocab_size: int,
    truncate_prompt_tokens: int | None = None,
    add_special_tokens: bool = True,
) -> ProcessedPrompt:
    """Tokenise and check `prompt`.

    `prompt` is a string, token ids, or a dict with either `prompt` or `prompt_token_ids` and
    perhaps `cache_salt`. `truncate_prompt_tokens=k` keeps the last k tokens (special tokens that
    the tokenizer adds are kept and counted); -1 keeps as many as the model takes. Raises
    `PromptError`, naming the value and the limit, for an empty or over-long prompt, ids outside [0,
    vocab_size), unknown keys, a bad salt, or a text prompt when `tokenizer` is None.
    """
    content, cache_salt = _open(prompt)
    keep = _truncation(truncate_prompt_tokens, max_model_len)
    if isinstance(content, str):
        text: str | None = content
        token_ids = _encode(content, tokenizer, max_model_len, keep, add_special_tokens)
    else:
        text = None
        token_ids = check_token_ids(content, vocab_size)
        if keep is not None:
            token_ids = token_ids[-keep:]
    if not token_ids:
        raise PromptError("the prompt is empty: at least one token is needed")
    if len(token_ids) >= max_model_len:
        raise PromptError(
            f"the prompt has {len(token_ids)} tokens, but at most {max_model_len - 1} leave room "
            f"for one output token (max_model_len is {max_model_len})"
        )
    if text is not None and (largest := max(token_ids)) >= vocab_size:
        raise PromptError(
            f"the tokenizer gives token id {largest}, but the model's vocabulary has {vocab_size}"
        )
    return ProcessedPrompt(text, token_ids, cache_salt)


def check_token_ids(ids: Any, vocab_size: int) -> list[int]:
    """`ids` as a list of plain ints, each in [0, vocab_size). Raises `PromptError` otherwise."""
    if isinstance(ids, np.ndarray):
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise PromptError(
                f"prompt token ids must be a flat list of integers, not an array of shape "
                f"{ids.shape} and dtype {ids.dtype}"
            )
        ids = ids.tolist()
    if not isinstance(ids, (list, tuple)):
        raise PromptError(f"a prompt must be {_FORMS}, not {type(ids).__name__}")
    if not set(map(type, ids)) <= {int}:
        ids = [_plain_int(token_id, place) for place, token_id in enumerate(ids)]
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        place = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)
        raise PromptError(
            f"token id {ids[place]} at position {place} is outside the vocabulary: "
            f"0 to {vocab_size - 1} are allowed"
        )
    return list(ids)


def check_cache_salt(salt: Any) -> str | None:
    """A valid cache salt, or None. Raises `PromptError` otherwise."""
    if salt is None:
        return None
    if not isinstance(salt, str):
        raise PromptError(f"cache_salt must be a string, not {type(salt).__name__}")
    if not 1 <= len(salt) <= MAX_CACHE_SALT:
        raise PromptError(
            f"cache_salt has {len(salt)} characters; 1 to {MAX_CACHE_SALT} are allowed"
        )
    if bad := [character for character in _SALT_FORBIDDEN if character in salt]:
        raise PromptError(f"cache_salt holds {bad[0]!r}; '@', '/', '\\' and NUL are not allowed")
    return salt


def _open(prompt: Prompt) -> tuple[Any, str | None]:
    if not isinstance(prompt, Mapping):
        return prompt, None
    given = {key: value for key, value in prompt.items() if value is not None}
    salt = check_cache_salt(given.pop("cache_salt", None))
    if unknown := sorted(map(str, given.keys() - {"prompt", "prompt_token_ids"})):
        raise PromptError(
            f"prompt key {unknown[0]!r} is not supported; allowed: prompt, prompt_token_ids, "
            "cache_salt"
        )
    if len(given) != 1:
        raise PromptError(
            f"a prompt dict needs exactly one of prompt and prompt_token_ids, not {len(given)}"
        )
    (key, content), *_ = given.items()
    if (key == "prompt") != isinstance(content, str):
        wanted = "a string" if key == "prompt" else "a list of token ids"
        raise PromptError(f"{key} must be {wanted}, not {type(content).__name__}")
    return content, salt


def _truncation(value: int | None, max_model_len: int) -> int | None:
    if value is None:
        return None
    if type(value) is not int or value == 0 or value < -1 or value > max_model_len:
        raise PromptError(
            f"truncate_prompt_tokens is {value!r}; -1 and 1 to {max_model_len} (max_model_len) are "
            "allowed"
        )
    return max_model_len - 1 if value == -1 else value


def _encode(
    text: str,
    tokenizer: Tokenizer | None,
    max_model_len: int,
    keep: int | None,
    add_special_tokens: bool,
) -> list[int]:
    if tokenizer is None:
        raise PromptError("no tokenizer is loaded: give prompt_token_ids instead of text")
    if not text:
        raise PromptError("the prompt is empty: at least one token is needed")
    # Keeps a caller from paying for the tokenisation of a text that could not fit anyhow.
    most = max_model_len * tokenizer.max_token_characters
    if len(text) > most:
        if keep is None:
            raise PromptError(
                f"the prompt has {len(text)} characters, more than {max_model_len} tokens "
                f"(max_model_len) can hold: no token is longer than "
                f"{tokenizer.max_token_characters} characters"
            )
        text = text[-most:]
    if keep is None:
        return tokenizer.encode(text, add_special_tokens)
    before, after = tokenizer.surrounding_ids if add_special_tokens else ([], [])
    room = keep - len(before) - len(after)
    if room < 1:
        raise PromptError(
            f"truncate_prompt_tokens is {keep}, but the tokenizer alone adds "
            f"{len(before) + len(after)} special tokens"
        )
    return [*before, *tokenizer.encode(text, add_special_tokens=False)[-room:], *after]


def _plain_int(value: Any, place: int) -> int:
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    raise PromptError(
        f"token id {value!r} at position {place} is {type(value).__name__}, not an integer"
    )
