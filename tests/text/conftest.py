"""One tokenizer of each kind for the tests of this package."""

import pytest

from jaxllm.text.tokenizer import Tokenizer, load_tokenizer
from tests.text.small_tokenizers import (
    byte_level_backend,
    metaspace_backend,
    sentencepiece_backend,
    smollm2_path,
    word_backend,
)


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return Tokenizer(byte_level_backend(), name="byte-level", bos_token_id=0, eos_token_id=1)


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    return Tokenizer(sentencepiece_backend(), name="pieces", bos_token_id=1, eos_token_id=2)


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    path = smollm2_path()
    if path is None:
        pytest.skip("the packaged model is not installed")
    return load_tokenizer(path, format="gguf")


@pytest.fixture(scope="session")
def every_tokenizer(byte_level, sentencepiece) -> dict[str, Tokenizer]:
    """One of each kind; with the packaged real one if it is installed."""
    found = {
        "byte-level": byte_level,
        "sentencepiece": sentencepiece,
        "sentencepiece-no-strip": Tokenizer(sentencepiece_backend(strip=False), name="no-strip"),
        "words": Tokenizer(word_backend(), name="words"),
        "metaspace": Tokenizer(metaspace_backend(), name="metaspace"),
    }
    if (path := smollm2_path()) is not None:
        found["smollm2"] = load_tokenizer(path, format="gguf")
    return found
