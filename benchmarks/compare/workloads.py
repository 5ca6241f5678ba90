"""What every engine is given: token ids made from a seed, so that all get the same.

Plain Python only, since each engine imports this in an environment of its own.
"""

import dataclasses
import hashlib
import random

# SmolLM2's vocabulary without its special tokens (0 to 16).
TOKEN_RANGE = (17, 49152)


@dataclasses.dataclass(frozen=True)
class Setup:
    """How every engine is started for a workload.

    Args:
        max_model_len: tokens of the longest request.
        prefix_caching: whether prompts that begin alike are computed once.
    """

    max_model_len: int
    prefix_caching: bool


SETUPS = {
    "plain": Setup(max_model_len=2048, prefix_caching=False),
    "prefix": Setup(max_model_len=2048, prefix_caching=True),
}
MAX_NUM_SEQS = 64


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests that all arrive at once.

    Args:
        name: what the command line calls it.
        requests: how many.
        prompt_tokens: fewest and most tokens of a prompt, both included, drawn evenly.
        new_tokens: tokens each request generates, EOS or not.
        seed: of lengths and ids.
        prefix_tokens: how many tokens all prompts of a round begin with, counted in prompt_tokens.
        setup: a key of SETUPS.
    """

    name: str
    requests: int
    prompt_tokens: tuple[int, int]
    new_tokens: int
    seed: int
    prefix_tokens: int = 0
    setup: str = "plain"

    def prompts(self, round_number: int = 0) -> list[list[int]]:
        """The token ids of each request; other ids in another round, lengths alike."""
        lengths = random.Random(self.seed)
        ids = random.Random(self.seed * 1000 + round_number)
        prefix = [ids.randrange(*TOKEN_RANGE) for _ in range(self.prefix_tokens)]
        return [
            prefix + [ids.randrange(*TOKEN_RANGE) for _ in range(length - len(prefix))]
            for length in (lengths.randint(*self.prompt_tokens) for _ in range(self.requests))
        ]


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("throughput", requests=64, prompt_tokens=(64, 255), new_tokens=128, seed=0),
        Workload("single", requests=1, prompt_tokens=(128, 128), new_tokens=128, seed=1),
        Workload("long", requests=8, prompt_tokens=(1500, 1500), new_tokens=64, seed=3),
        Workload(
            "prefix",
            requests=32,
            prompt_tokens=(1016, 1064),
            new_tokens=32,
            seed=4,
            prefix_tokens=1000,
            setup="prefix",
        ),
        Workload("smoke", requests=4, prompt_tokens=(16, 48), new_tokens=8, seed=2),
    )
}


def common_prefix(prompts: list[list[int]]) -> int:
    """Tokens that all prompts begin with, leaving each at least one of its own."""
    first, last = min(prompts), max(prompts)
    limit = min(map(len, prompts)) - 1
    return next((i for i in range(limit) if first[i] != last[i]), limit)


def digest(sequences: list[list[int]]) -> str:
    """A short name for token ids: equal ids, equal digest."""
    text = "\n".join(" ".join(map(str, ids)) for ids in sequences)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
