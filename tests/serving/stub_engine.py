"""An engine process whose device is made of Python: it starts at once, and can be slow or broken.

The tokens a request gets depend on its whole past, so lost or mixed tokens show. `SERVING_STUB`
in the environment is a JSON object of settings (see `Settings`).
"""

import dataclasses
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.engine.request import Request
from jaxllm.engine.scheduler import SchedulerConfig
from jaxllm.engine.step_plan import LogprobRows, StepPlan, StepResult
from serving.engine import process
from serving.engine.messages import Start

VOCAB = 272


@dataclasses.dataclass
class Settings:
    step_seconds: float = 0.0
    start_seconds: float = 0.0
    start_error: str | None = None
    # A prompt with this token makes the step raise, hang or end the process.
    raise_on: int | None = None
    hang_on: int | None = None
    exit_on: int | None = None
    # Output of every request, as bytes; without it a hash of the past decides.
    script: str | None = None
    # Tokens that cost nothing to make: letters by their place.
    quick: bool = False


def next_token(settings: Settings, request: Request, position: int) -> int:
    if settings.quick:
        return TOKEN_OF_BYTE[97 + position % 26]
    tokens = request.token_ids[:position]
    bias = request.params.logit_bias or {}
    for token, value in bias.items():
        if value >= 100 and (
            position - request.num_prompt_tokens >= request.params.min_tokens or token != 1
        ):
            return int(token)
    if settings.script is not None:
        text = settings.script.encode()
        place = position - request.num_prompt_tokens
        return TOKEN_OF_BYTE[text[place]] if place < len(text) else 1
    digest = hashlib.sha256(
        np.asarray(
            [*tokens, request.seed % 1000 if request.params.temperature else 0], "<i4"
        ).tobytes()
    ).digest()
    return 4 + int.from_bytes(digest[:4], "little") % 256


def _byte_tokens() -> list[int]:
    from tokenizers import pre_tokenizers

    from tests.serving.tiny_model import SPECIAL

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # The standard table of byte-level BPE: printable bytes stand for themselves.
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = {byte: chr(byte) for byte in kept}
    for byte in range(256):
        if byte not in characters:
            characters[byte] = chr(256 + len(characters) - len(kept))
    return [len(SPECIAL) + alphabet.index(characters[byte]) for byte in range(256)]


TOKEN_OF_BYTE = _byte_tokens()


@dataclasses.dataclass
class StubStep:
    plan_result: StepResult

    def result(self) -> StepResult:
        return self.plan_result


class StubRunner:
    def __init__(self, settings: Settings):
        self.settings = settings

    def dispatch(self, plan: StepPlan) -> StubStep:
        settings = self.settings
        for request in plan.requests:
            prompt = request.token_ids[: request.num_prompt_tokens]
            if settings.raise_on in prompt:
                raise RuntimeError("device lost")
            if settings.hang_on in prompt:
                time.sleep(3600)
            if settings.exit_on in prompt:
                os._exit(9)
        if settings.step_seconds:
            time.sleep(settings.step_seconds)
        sampled = []
        prompts = {}
        for index, (request, start, count, samples) in enumerate(
            zip(plan.requests, plan.starts, plan.counts, plan.samples, strict=True)
        ):
            if samples:
                sampled.append(next_token(settings, request, start + count))
            rows = min(start + count, request.num_prompt_tokens - 1) - start
            if request.params.prompt_logprobs is not None and rows > 0:
                prompts[index] = _rows(request.token_ids[start + 1 : start + 1 + rows])
        return StubStep(StepResult(np.asarray(sampled, np.int32), _rows(sampled), prompts))

    def reset(self) -> None:
        pass


def _rows(tokens: list[int]) -> LogprobRows:
    count = len(tokens)
    top = np.asarray([[token, *((token + i) % VOCAB for i in range(1, 20))] for token in tokens])
    values = -0.5 - 0.25 * np.arange(20, dtype=np.float32)
    return LogprobRows(
        np.full(count, -0.5, np.float32),
        np.ones(count, np.int32),
        np.tile(values, (count, 1)),
        top.astype(np.int32).reshape(count, 20),
    )


def start(command: Start) -> SimpleNamespace:
    settings = Settings(**json.loads(os.environ.get("SERVING_STUB", "{}")))
    time.sleep(settings.start_seconds)
    if settings.start_error:
        raise ValueError(settings.start_error)
    config = EngineConfig(**command.config)
    limits = SchedulerConfig(
        config.max_num_seqs or 8,
        config.max_num_batched_tokens or 64,
        config.max_model_len or 512,
        config.block_size or 16,
    )
    generation = Path(config.model) / "generation_config.json"
    core = EngineCore(limits, StubRunner(settings), num_blocks=config.num_blocks or 129)
    return SimpleNamespace(
        config=config,
        core=core,
        tokenizer=None,
        scheduler_config=limits,
        model_config=SimpleNamespace(vocab_size=VOCAB),
        checkpoint=SimpleNamespace(path=Path(config.model)),
        num_blocks=config.num_blocks or 129,
        eos_token_ids=frozenset({1}),
        generation_config=json.loads(generation.read_text()) if generation.exists() else {},
    )


if __name__ == "__main__":
    process.exit_now(process.main(sys.argv[1:], start))
