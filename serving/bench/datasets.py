"""What the requests of a load test ask for: random text, ShareGPT files, or JSONL files."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxllm.errors import ConfigError

# Conversations outside of these lengths are left out, as in vLLM's benchmark.
SHAREGPT_LEAST = 4
SHAREGPT_MOST_PROMPT = 1024
SHAREGPT_MOST_TOTAL = 2048
_FIT_ROUNDS = 10


class DatasetError(ConfigError):
    """A data set that cannot be used."""


class TextCodec(Protocol):
    """What is needed of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...


@dataclasses.dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request.

    Attributes:
      prompt_len: tokens, special ones that the server adds included; 0 if it is not known.
      output_len: most tokens to generate.
    """

    prompt: str
    prompt_len: int
    output_len: int


@dataclasses.dataclass(frozen=True, slots=True)
class RandomLengths:
    """Lengths of random requests, in tokens.

    Attributes:
      input_len, output_len: means.
      range_ratio: lengths are uniform within (1 - r) and (1 + r) times their mean, 0 <= r < 1.
      prefix_len: tokens at the start that all prompts share, added to input_len.
    """

    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0

    def __post_init__(self) -> None:
        for name, low in (("input_len", 1), ("output_len", 1), ("prefix_len", 0)):
            if getattr(self, name) < low:
                raise DatasetError(f"{name}={getattr(self, name)}: must be at least {low}")
        if not 0 <= self.range_ratio < 1:
            raise DatasetError(f"range_ratio={self.range_ratio}: must be in [0, 1)")

    def draw(
        self, count: int, random: np.random.Generator, least_input: int
    ) -> tuple[list[int], list[int]]:
        """Input (without the prefix) and output lengths; DatasetError below `least_input`."""
        inputs = self._uniform(self.input_len, count, random)
        if min(inputs) < least_input:
            raise DatasetError(
                f"input_len={self.input_len} with range_ratio={self.range_ratio}: the tokenizer "
                f"adds special tokens, so prompts must have at least {least_input}"
            )
        return inputs, self._uniform(self.output_len, count, random)

    def _uniform(self, mean: int, count: int, random: np.random.Generator) -> list[int]:
        low = max(1, math.floor(mean * (1 - self.range_ratio)))
        high = max(1, math.ceil(mean * (1 + self.range_ratio)))
        return random.integers(low, high, count, endpoint=True).tolist()


def random_requests(
    count: int, lengths: RandomLengths, tokenizer: TextCodec, seed: int
) -> list[BenchRequest]:
    """Texts of random tokens, of exactly the drawn lengths wherever the tokenizer allows it.

    Text of random tokens seldom tokenises back to as many; it is cut or extended until it does.
    `prompt_len` is what it has in the end.
    """
    random = np.random.default_rng(seed)
    num_special = len(tokenizer.encode(""))
    inputs, outputs = lengths.draw(count, random, num_special + 1)
    usable = _usable_tokens(tokenizer)
    prefix = random.choice(usable, lengths.prefix_len).tolist()
    requests = []
    for input_len, output_len in zip(inputs, outputs, strict=True):
        wanted = lengths.prefix_len + input_len - num_special
        text, found = _text_of(tokenizer, usable, prefix, wanted, random)
        requests.append(BenchRequest(text, found + num_special, output_len))
    return requests


def random_word_requests(count: int, lengths: RandomLengths, seed: int) -> list[BenchRequest]:
    """Texts of random words, one word for each token wanted: without a tokenizer nobody knows how
    many there are before the server says so."""
    random = np.random.default_rng(seed)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))

    def words(number: int) -> list[str]:
        return ["".join(random.choice(letters, 4)) for _ in range(number)]

    inputs, outputs = lengths.draw(count, random, 1)
    prefix = words(lengths.prefix_len)
    return [
        BenchRequest(" ".join([*prefix, *words(input_len)]), 0, output_len)
        for input_len, output_len in zip(inputs, outputs, strict=True)
    ]


def sharegpt_requests(
    path: Path,
    count: int,
    tokenizer: TextCodec | None,
    *,
    output_len: int | None,
    seed: int,
    shuffle: bool = True,
    oversample: bool = True,
) -> list[BenchRequest]:
    """First question and the length of its answer of each conversation in a ShareGPT file.

    Without a tokenizer `output_len` must be given, and no conversation is left out for its length.
    """
    content = _read(path, json.loads)
    if not isinstance(content, list):
        raise DatasetError(f"{path}: not a list of conversations")
    if tokenizer is None and output_len is None:
        raise DatasetError("sharegpt without a tokenizer needs --sharegpt-output-len")
    requests: list[BenchRequest] = []
    for place in _order(len(content), seed, shuffle):
        if len(requests) == count:
            break
        turns = content[place].get("conversations") if isinstance(content[place], dict) else None
        if not isinstance(turns, list) or len(turns) < 2:
            continue
        try:
            question, answer = (str(turn["value"]) for turn in turns[:2])
        except (TypeError, KeyError):
            raise DatasetError(f"{path}: conversation {place} has a turn without a value") from None
        if tokenizer is None:
            requests.append(BenchRequest(question, 0, output_len or 1))
            continue
        prompt_len = len(tokenizer.encode(question))
        length = output_len or len(tokenizer.encode(answer, add_special_tokens=False))
        fits = SHAREGPT_LEAST <= prompt_len <= SHAREGPT_MOST_PROMPT and (
            prompt_len + length <= SHAREGPT_MOST_TOTAL
        )
        if fits and (output_len is not None or length >= SHAREGPT_LEAST):
            requests.append(BenchRequest(question, prompt_len, length))
    return _fill(requests, count, oversample, path)


def custom_requests(
    path: Path,
    count: int,
    tokenizer: TextCodec | None,
    *,
    output_len: int,
    seed: int,
    shuffle: bool = True,
    oversample: bool = True,
) -> list[BenchRequest]:
    """A JSONL file of {"prompt": TEXT}; with output_len -1 also {"output_tokens": N}."""

    def parse(text: str) -> list[Any]:
        return [json.loads(line) for line in text.splitlines() if line.strip()]

    lines = _read(path, parse)
    requests = []
    for place in _order(len(lines), seed, shuffle)[:count]:
        entry = lines[place]
        prompt = entry.get("prompt") if isinstance(entry, dict) else None
        if not isinstance(prompt, str) or not prompt:
            raise DatasetError(f"{path}: entry {place + 1} has no prompt")
        length = entry.get("output_tokens") if output_len == -1 else output_len
        if type(length) is not int or length < 1:
            raise DatasetError(f"{path}: entry {place + 1}: output_tokens={length!r}: at least 1")
        prompt_len = len(tokenizer.encode(prompt)) if tokenizer is not None else 0
        requests.append(BenchRequest(prompt, prompt_len, length))
    return _fill(requests, count, oversample, path)


def _usable_tokens(tokenizer: TextCodec) -> np.ndarray:
    """Tokens that stand for text of their own, int64 [tokens]."""
    ids = [i for i in range(tokenizer.vocab_size) if tokenizer.decode([i]).strip(" �")]
    if not ids:
        raise DatasetError("the tokenizer has no token of text")
    return np.asarray(ids)


def _text_of(
    tokenizer: TextCodec,
    usable: np.ndarray,
    prefix: list[int],
    wanted: int,
    random: np.random.Generator,
) -> tuple[str, int]:
    """A text of `wanted` tokens that begins with `prefix`, and the tokens it really has."""
    ids = [*prefix, *random.choice(usable, max(0, wanted - len(prefix))).tolist()]
    for _ in range(_FIT_ROUNDS):
        text = tokenizer.decode(ids, skip_special_tokens=False)
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) == wanted:
            break
        missing = wanted - len(ids)
        ids = [*ids[:wanted], *random.choice(usable, max(0, missing)).tolist()]
    else:
        text = tokenizer.decode(ids, skip_special_tokens=False)
    return text, len(tokenizer.encode(text, add_special_tokens=False))


def _read(path: Path, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path}: {error}") from None


def _order(count: int, seed: int, shuffle: bool) -> list[int]:
    return np.random.default_rng(seed).permutation(count).tolist() if shuffle else [*range(count)]


def _fill(
    requests: list[BenchRequest], count: int, oversample: bool, path: Path
) -> list[BenchRequest]:
    """`count` requests: those that there are, again and again if need be."""
    if not requests:
        raise DatasetError(f"{path}: no usable entry")
    if len(requests) < count and not oversample:
        raise DatasetError(f"{path}: {len(requests)} usable entries, {count} are wanted")
    return [requests[i % len(requests)] for i in range(count)]
