"""Bar 19: the time to the first token tells nothing of what another salt has asked.

The same test with one salt shows that it would notice.
"""

import asyncio
import json
import random
import shutil
import tempfile
from pathlib import Path

from benchmarks.reliability.harness import (
    COMPLETIONS,
    TINY_MODEL,
    Check,
    Options,
    Server,
    bar,
    request,
    running,
)

_TRIALS = 200
# The same salt is told at once; fewer trials show that.
_CONTROL_TRIALS = 60
_PROMPT_TOKENS = 600


def _larger_model(folder: Path) -> Path:
    """The tiny model's tokenizer with a model whose prefill takes time that can be measured."""
    shutil.copytree(TINY_MODEL, folder, dirs_exist_ok=True)
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    config |= {"head_dim": 32, "num_attention_heads": 8, "max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


async def _first_token(server: Server, prompt: list[int], salt: str) -> float:
    body = {"prompt": prompt, "max_tokens": 1, "cache_salt": salt, "temperature": 0}
    return (await request(server.address, "POST", COMPLETIONS, body)).seconds


async def _accuracy(server: Server, salts: tuple[str, str], trials: int) -> float:
    """AUC of telling, by the second salt's time, whether the first one had asked the same."""
    chance = random.Random(f"{salts}")
    asked, fresh = [], []
    for trial in range(trials):
        prompt = [chance.randrange(10, 280) for _ in range(_PROMPT_TOKENS)]
        if trial % 2:
            await _first_token(server, prompt, salts[0])
            asked.append(await _first_token(server, prompt, salts[1]))
        else:
            other = [chance.randrange(10, 280) for _ in range(_PROMPT_TOKENS)]
            await _first_token(server, other, salts[0])
            fresh.append(await _first_token(server, prompt, salts[1]))
    wins = sum((a < f) + 0.5 * (a == f) for a in asked for f in fresh)
    return wins / (len(asked) * len(fresh))


@bar("19", "isolation of the prefix cache")
def isolation(options: Options) -> list[Check]:
    with tempfile.TemporaryDirectory() as folder:
        model = _larger_model(Path(folder))
        flags = ("--load-format=dummy", "--max-num-seqs=2", "--max-num-batched-tokens=512")
        with running(*flags, "--kv-cache-memory=512MiB", model=model) as server:
            asyncio.run(_accuracy(server, ("warm", "up"), 10))
            apart = asyncio.run(_accuracy(server, ("tenant-a", "tenant-b"), _TRIALS))
            same = asyncio.run(_accuracy(server, ("tenant-a", "tenant-a"), _CONTROL_TRIALS))
            return [
                Check("two salts: |AUC - 0.5|", abs(apart - 0.5), "", 0.1),
                Check("one salt: AUC", same, "", 0.9, at_least=True),
                server.idle_check(),
            ]
