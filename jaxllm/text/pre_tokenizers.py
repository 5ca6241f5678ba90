"""How each byte-level BPE vocabulary cuts text before merging, by its GGUF pre-tokenizer name.

The split patterns are part of a vocabulary's definition: they are those of the models' own
`tokenizer.json`. A GGUF file holds only the name (`tokenizer.ggml.pre`).
"""

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from jaxllm.text.errors import TokenizerError

_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way to cut text.

    `pattern` is the split pattern, or None for GPT-2's own, which `tokenizers` has built in.
    `digits` isolates each digit first. `ignore_merges` takes a piece that is a token as it is.
    `add_bos` is the default where the file does not say. `nfc` normalises the text first.
    """

    pattern: str | None = None
    digits: bool = False
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), "isolated"))
        steps.append(
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None)
        )
        return pre_tokenizers.Sequence(steps)

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_GPT2 = PreTokenizer()
_DIGITS = PreTokenizer(digits=True)
_LLAMA3 = PreTokenizer(_CL100K % "1,3", ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer(_CL100K % "1", nfc=True)

KNOWN: dict[str, PreTokenizer] = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "codeshell": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "smaug-bpe": PreTokenizer(_CL100K % "1,3"),
    "dbrx": PreTokenizer(_CL100K % "1,3"),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": PreTokenizer(_CL100K % "1"),
    "tekken": PreTokenizer(_TEKKEN, ignore_merges=True, add_bos=True),
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer called `name` in GGUF files. Raises `TokenizerError` for an unknown one."""
    try:
        return KNOWN[name]
    except KeyError:
        raise TokenizerError(
            f"pre-tokenizer {name!r} is not known; known: {', '.join(sorted(KNOWN))}"
        ) from None
