"""Bad words as token sequences."""

from collections.abc import Sequence

from jaxllm.errors import ParameterError
from jaxllm.text.tokenizer import Tokenizer

MAX_SEQUENCES = 128


def bad_word_ids(tokenizer: Tokenizer | None, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Every token sequence that spells a bad word: as it is, and after a space.

    Raises:
      ParameterError: there is no tokenizer, or there are more than 128 sequences.
    """
    if not words:
        return ()
    if tokenizer is None:
        raise ParameterError("bad_words", list(words), "needs a tokenizer")
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        for text in (word, bare, " " + bare):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if ids and tokenizer.decode(list(ids)).strip() == text.strip():
                sequences[ids] = None
    if len(sequences) > MAX_SEQUENCES:
        raise ParameterError(
            "bad_words", len(sequences), f"at most {MAX_SEQUENCES} token sequences"
        )
    return tuple(sequences)
