"""One tokenizer class over the `tokenizers` library, whatever the checkpoint format."""

import logging
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import tokenizers

from jaxllm.text.errors import PromptError, TokenizerError, UnencodableTextError
from jaxllm.text.gguf_tokenizer import load_gguf_tokenizer
from jaxllm.text.token_bytes import Joining, TokenTables, decoding_of

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_FOLDER_FORMATS = ("safetensors", "orbax", "dummy")


class Tokenizer:
    """Text to token ids and back. Immutable once built, so threads may share it.

    `bos_token_id` and `eos_token_id` are None where the vocabulary has none. `special_ids` are the
    ids left out by `skip_special_tokens`. `special_tokens` maps names as chat templates know them
    (`bos_token`, `eos_token`, ...) to their text. `chat_template` is the default template, None if
    the model has none; `tool_chat_template` the one to use with tools (the same unless the model
    has two).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        name: str,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        special_tokens: dict[str, str] | None = None,
        chat_template: str | None = None,
        tool_chat_template: str | None = None,
    ):
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.name = name
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.special_tokens = dict(special_tokens or {})
        for key, token_id in (("bos_token", bos_token_id), ("eos_token", eos_token_id)):
            if token_id is not None and (text := backend.id_to_token(token_id)) is not None:
                self.special_tokens.setdefault(key, text)
        self.chat_template = chat_template
        self.tool_chat_template = tool_chat_template or chat_template
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self.decoding = decoding_of(backend)
        self._tables = (
            TokenTables(backend, self.decoding),
            TokenTables(backend, self.decoding, skipped=self.special_ids),
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the tokens that the model expects around it (BOS, EOS) or
        without.

        Raises `PromptError` for what is not a string, `UnencodableTextError` for lone surrogates.
        """
        _check_text(text)
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """`encode` of each text, in parallel threads of the library."""
        for text in texts:
            _check_text(text)
        encodings = self.backend.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        return [encoding.ids for encoding in encodings]

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Text of the token ids; ids without a token are left out.

        Without `spaces_between_special_tokens`, no space stands between adjacent special tokens.
        Only decoders that put spaces between all tokens write one there.
        """
        if (
            self.decoding.joining is Joining.OTHER
            and not skip_special_tokens
            and not spaces_between_special_tokens
        ):
            parts = split_between_special(ids, self.special_ids)
            return "".join(self._decode(part, skip_special_tokens=False) for part in parts)
        return self._decode(ids, skip_special_tokens)

    def token_to_bytes(self, token_id: int) -> bytes:
        """The exact bytes that a token adds to the text; `b""` for an id without a token.

        For special tokens, the UTF-8 of their name. A leading space that decoding a whole text
        would drop is kept.
        """
        return self._tables[False].bytes[token_id]

    def tables(self, skip_special_tokens: bool) -> TokenTables:
        """What each token stands for, special tokens shown or standing for nothing."""
        return self._tables[skip_special_tokens]

    @cached_property
    def surrounding_ids(self) -> tuple[list[int], list[int]]:
        """The special ids that `encode` puts before and after every text."""
        body = self.backend.encode("a", add_special_tokens=False).ids
        whole = self.backend.encode("a", add_special_tokens=True).ids
        for start in range(len(whole) - len(body) + 1):
            if whole[start : start + len(body)] == body:
                return whole[:start], whole[start + len(body) :]
        raise TokenizerError(f"{self.name}: special tokens change how the text itself is cut")

    @cached_property
    def max_token_characters(self) -> int:
        """Length of the longest vocabulary entry, in characters (bytes for byte-level BPE)."""
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=1)

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        try:
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError):
            raise PromptError(f"{_first_bad_id(ids)!r} is not a token id in [0, 2**32)") from None


def tokenizer_format(
    source: Path | str, *, is_model: bool = False
) -> Literal["gguf", "safetensors"]:
    """The `format` with which `load_tokenizer` reads `source`, known before anything is read.

    Args:
      source: what holds the tokenizer: a folder, .gguf file or hub id.
      is_model: `source` is what a user calls a model, which `checkpoints.resolve` has yet to find;
        the answer is that for the place it will find. Then it may also be a folder with nothing but
        a GGUF file, or the name of a packaged model, which has no slash as hub ids have; packaged
        models are GGUF files.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        is_gguf = is_model and not (path / "config.json").is_file() and any(path.glob("*.gguf"))
    elif path.suffix == ".gguf":
        is_gguf = True
    else:
        is_gguf = is_model and "/" not in str(source)
    return "gguf" if is_gguf else "safetensors"


def load_tokenizer(
    path: Path | str,
    *,
    format: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Tokenizer:
    """Load the tokenizer of a checkpoint.

    `format` (`tokenizer_format` tells it) is "gguf" for a GGUF file; for "safetensors" and "orbax"
    the path is a folder in the manner of Hugging Face, or a hub id (then `revision` names a branch,
    tag or commit); for "dummy" it is any of these.

    Code from model repositories is never run: `trust_remote_code` is accepted because many launch
    scripts pass it, and a tokenizer that exists only as such code is refused either way.
    Raises `TokenizerError` for anything that cannot be loaded.
    """
    if format == "gguf" or (format == "dummy" and Path(path).is_file()):
        found = load_gguf_tokenizer(Path(path))
        return Tokenizer(
            found.backend,
            name=str(path),
            bos_token_id=found.bos_token_id,
            eos_token_id=found.eos_token_id,
            chat_template=found.chat_template,
            tool_chat_template=found.tool_chat_template,
        )
    if format not in _FOLDER_FORMATS:
        raise TokenizerError(
            f"tokenizer format {format!r} is not one of gguf, {', '.join(_FOLDER_FORMATS)}"
        )
    return _load_hugging_face(str(path), revision, trust_remote_code)


def split_between_special(ids: Sequence[int], special: frozenset[int]) -> list[Sequence[int]]:
    """Cut `ids` wherever two special tokens are adjacent."""
    cuts = [i for i in range(1, len(ids)) if ids[i] in special and ids[i - 1] in special]
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def _load_hugging_face(source: str, revision: str | None, trust_remote_code: bool) -> Tokenizer:
    if not Path(source).is_dir() and not _HUB_ID.fullmatch(source):
        raise TokenizerError(f"{source!r} is neither a folder nor a hub id")
    auto_tokenizer = import_auto_tokenizer()
    try:
        found = auto_tokenizer.from_pretrained(
            source,
            revision=revision,
            trust_remote_code=False,
            local_files_only=Path(source).is_dir(),
        )
    except Exception as error:
        hint = ""
        if "trust_remote_code" in str(error):
            asked = " (trust_remote_code=True does not change that)" if trust_remote_code else ""
            hint = (
                f"; jaxllm runs no code from model repositories{asked}: a tokenizer.json is needed"
            )
        raise TokenizerError(
            f"no tokenizer can be loaded from {source!r}: {error}{hint}"
        ) from error
    backend = getattr(found, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise TokenizerError(
            f"{source!r} gives a {type(found).__name__}, which is not backed by the tokenizers "
            "library; a tokenizer.json is needed"
        )
    templates = found.chat_template
    if not isinstance(templates, dict):
        templates = {"default": templates}
    return Tokenizer(
        backend,
        name=source,
        bos_token_id=found.bos_token_id,
        eos_token_id=found.eos_token_id,
        special_tokens={
            name: str(token)
            for name, token in found.special_tokens_map.items()
            if not isinstance(token, (list, tuple, dict))
        },
        chat_template=templates.get("default"),
        tool_chat_template=templates.get("tool_use"),
    )


def import_auto_tokenizer() -> Any:
    """transformers' AutoTokenizer. Imported when it is first asked for, since it takes seconds."""
    # transformers says at import that models need torch; no user of this engine needs to hear it.
    logger = logging.getLogger("transformers")

    def unrelated(record: logging.LogRecord) -> bool:
        return "PyTorch was not found" not in record.getMessage()

    logger.addFilter(unrelated)
    try:
        from transformers import AutoTokenizer
    finally:
        logger.removeFilter(unrelated)
    return AutoTokenizer


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise PromptError(f"text to encode must be a string, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnencodableTextError(
            f"text has a lone surrogate {text[error.start]!a} at position {error.start}, "
            "which no UTF-8 text can hold"
        ) from None


def _first_bad_id(ids: Sequence[Any]) -> Any:
    for token_id in ids:
        if not isinstance(token_id, int) or not 0 <= token_id < 2**32:
            return token_id
    return ids
