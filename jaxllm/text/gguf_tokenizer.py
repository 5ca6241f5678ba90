"""The tokenizer inside a GGUF file, rebuilt with the `tokenizers` library.

Two vocabulary kinds (`tokenizer.ggml.model`) are known. `gpt2` is byte-level BPE with ranked
merges. `llama` is SentencePiece BPE: a score per token, spaces written as U+2581, bytes as `<0xNN>`
tokens.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from jaxllm.text.errors import TokenizerError
from jaxllm.text.gguf_metadata import read_gguf_metadata
from jaxllm.text.pre_tokenizers import pre_tokenizer

_PREFIX = "tokenizer."
_SPACE = "▁"
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """What a GGUF file says about text: the tokenizer, its end ids and its chat templates."""

    backend: tokenizers.Tokenizer
    bos_token_id: int | None
    eos_token_id: int | None
    chat_template: str | None
    tool_chat_template: str | None


def load_gguf_tokenizer(path: Path) -> GgufTokenizer:
    """Read and build the tokenizer of the GGUF file at `path`.

    Raises `TokenizerError` for a file without a vocabulary, a vocabulary kind or a pre-tokenizer
    that is not known, and for lists that do not fit together.
    """
    meta = _Metadata(path, read_gguf_metadata(path, _PREFIX))
    kind = meta.string("ggml.model")
    tokens = _unique(path, meta.strings("ggml.tokens"))
    vocab = {token: i for i, token in enumerate(tokens)}
    if kind == "gpt2":
        backend, add_bos = _byte_level(meta, vocab)
    elif kind == "llama":
        backend, add_bos = _sentencepiece(meta, tokens, vocab)
    else:
        raise TokenizerError(f"{path}: tokenizer model {kind!r} is not known; known: gpt2, llama")
    _add_special(backend, meta, tokens)
    bos, eos = (meta.token_id(f"ggml.{name}_token_id", len(tokens)) for name in ("bos", "eos"))
    if kind == "llama":
        bos, eos = (1 if bos is None else bos), (2 if eos is None else eos)
    _post_process(
        backend,
        bos if meta.flag("ggml.add_bos_token", add_bos) else None,
        eos if meta.flag("ggml.add_eos_token", False) else None,
    )
    return GgufTokenizer(
        backend,
        bos,
        eos,
        chat_template=meta.string("chat_template", optional=True),
        tool_chat_template=meta.string("chat_template.tool_use", optional=True),
    )


def _byte_level(meta: "_Metadata", vocab: dict[str, int]) -> tuple[tokenizers.Tokenizer, bool]:
    pre = pre_tokenizer(meta.string("ggml.pre"))
    merges = [_merge(meta.path, text) for text in meta.strings("ggml.merges")]
    backend = _build(meta.path, vocab, merges, ignore_merges=pre.ignore_merges)
    if (normalizer := pre.normalizer()) is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _sentencepiece(
    meta: "_Metadata", tokens: list[str], vocab: dict[str, int]
) -> tuple[tokenizers.Tokenizer, bool]:
    scores = meta.numbers("ggml.scores", len(tokens))
    unknown = meta.token_id("ggml.unknown_token_id", len(tokens)) or 0
    backend = _build(
        meta.path,
        vocab,
        _merges_from_scores(tokens, scores, vocab),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    replace = normalizers.Replace(" ", _SPACE)
    decoder = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if meta.flag("ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace])
        decoder.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = replace
    backend.decoder = decoders.Sequence(decoder)
    return backend, True


def _merges_from_scores(
    tokens: list[str], scores: list[float], vocab: dict[str, int]
) -> list[tuple[str, str]]:
    """Ranked merges equivalent to SentencePiece's rule "join the pair with the best score".

    Every way to cut a token into two tokens is a merge. Higher scores rank first; of the cuts of
    one token, the one with the longest left part, which is the order in converted `tokenizer.json`
    files.
    """
    ranked: list[tuple[float, int, int, int, int]] = []
    for token_id, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[token_id], -cut, token_id, left, right))
    ranked.sort()
    return [(tokens[left], tokens[right]) for _, _, _, left, right in ranked]


def _build(
    path: Path, vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any
) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:
        # The binding raises bare Exception for merges that name tokens outside the vocabulary.
        raise TokenizerError(f"{path}: vocabulary and merges do not fit: {error}") from error


def _add_special(backend: tokenizers.Tokenizer, meta: "_Metadata", tokens: list[str]) -> None:
    types = meta.numbers("ggml.token_type", len(tokens))
    special = [
        AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(special)


def _post_process(backend: tokenizers.Tokenizer, bos: int | None, eos: int | None) -> None:
    names = [None if i is None else backend.id_to_token(i) for i in (bos, eos)]
    if not any(names):
        return
    first, last = names
    template = " ".join(part for part in (first, "$A", last) if part)
    pairs = [(name, i) for name, i in zip(names, (bos, eos), strict=True) if name is not None]
    backend.post_processor = processors.TemplateProcessing(
        single=template, pair=f"{template} $B:1", special_tokens=pairs
    )


def _unique(path: Path, tokens: list[str]) -> list[str]:
    named = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    seen: dict[str, int] = {}
    for i, token in enumerate(named):
        if (first := seen.setdefault(token, i)) != i:
            raise TokenizerError(f"{path}: token {token!r} appears as id {first} and id {i}")
    if not named:
        raise TokenizerError(f"{path}: the vocabulary is empty")
    return named


def _merge(path: Path, text: str) -> tuple[str, str]:
    # A token may itself begin with a space, but never is one in a merge.
    cut = text.find(" ", 1)
    if cut < 0 or cut == len(text) - 1:
        raise TokenizerError(f"{path}: merge {text!r} is not two tokens with a space between")
    return text[:cut], text[cut + 1 :]


class _Metadata:
    """Typed look-ups, each refusing a missing or ill-typed key by name."""

    def __init__(self, path: Path, values: dict[str, Any]):
        self.path = path
        self._values = values

    def string(self, key: str, optional: bool = False) -> Any:
        return self._get(key, str, optional)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, bool, optional=True)
        return default if value is None else value

    def strings(self, key: str) -> list[str]:
        values = self._get(key, list)
        if values and not isinstance(values[0], str):
            raise self._error(key, f"holds {type(values[0]).__name__} values, not strings")
        return values

    def numbers(self, key: str, length: int) -> list[Any]:
        values = self._get(key, list)
        if len(values) != length:
            raise self._error(key, f"has {len(values)} entries for {length} tokens")
        if isinstance(values[0], str):
            raise self._error(key, "holds strings, not numbers")
        return values

    def token_id(self, key: str, vocab_size: int) -> int | None:
        value = self._get(key, int, optional=True)
        if value is not None and not 0 <= value < vocab_size:
            raise self._error(key, f"is {value}, outside the vocabulary of {vocab_size}")
        return value

    def _get(self, key: str, kind: type, optional: bool = False) -> Any:
        value = self._values.get(_PREFIX + key)
        if value is None:
            if optional:
                return None
            raise self._error(key, "is missing")
        if not isinstance(value, kind):
            raise self._error(key, f"is {type(value).__name__}, not {kind.__name__}")
        return value

    def _error(self, key: str, what: str) -> TokenizerError:
        return TokenizerError(f"{self.path}: {_PREFIX}{key} {what}")
