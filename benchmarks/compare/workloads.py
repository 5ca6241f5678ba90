"""What every engine is given: token ids made from a seed, so that all get the same.

Plain Python only, since each engine imports this in an environment of its own.
"""

import dataclasses
import hashlib
import random

# SmolLM2's vocabulary without its special tokens (0 to 16).
TOKEN_RANGE = (17, 49152)


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests that all arrive at once.

    Args:
        name: what the command line calls it.
        requests: how many.
        prompt_tokens: fewest and most tokens of a prompt, both included, drawn evenly.
        new_tokens: tokens each request generates, EOS or not.
        seed: of lengths and ids.
    """

    name: str
    requests: int
    prompt_tokens: tuple[int, int]
    new_tokens: int
    seed: int

    def prompts(self) -> list[list[int]]:
        """The token ids of each request."""
        rng = random.Random(self.seed)
        lengths = [rng.randint(*self.prompt_tokens) for _ in range(self.requests)]
        return [[rng.randrange(*TOKEN_RANGE) for _ in range(length)] for length in lengths]


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("throughput", requests=64, prompt_tokens=(64, 255), new_tokens=128, seed=0),
        Workload("single", requests=1, prompt_tokens=(128, 128), new_tokens=128, seed=1),
        Workload("smoke", requests=4, prompt_tokens=(16, 48), new_tokens=8, seed=2),
    )
}

# Room for the longest request of any workload.
MAX_MODEL_LEN = 512
MAX_NUM_SEQS = 64


def digest(sequences: list[list[int]]) -> str:
    """A short name for token ids: equal ids, equal digest."""
    text = "\n".join(" ".join(map(str, ids)) for ids in sequences)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
