"""The memory of a step against what a runner really holds while it runs each program."""

import collections
import copy
import dataclasses

import jax
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams, sizing
from jaxllm.config import EngineConfig
from jaxllm.execution.memory import GIB, RESERVE_BYTES
from jaxllm.execution.programs import ProgramKey
from jaxllm.execution.runner import DeviceLogprobs, Runner
from jaxllm.execution.step_memory import (
    HELD_LOGITS,
    ProgramMemory,
    largest_programs,
    step_memory,
)
from tests.models.families import DATA

PROMPT = {"prompt_token_ids": [5, 9, 14, 40, 41, 42, 7, 8, 30, 31, 32, 33]}
ROWS = 2


def start(**settings) -> LLM:
    return LLM(
        str(DATA / "tiny_chat"), dtype="float32", max_model_len=64, max_num_seqs=ROWS,
        max_num_batched_tokens=32, block_size=8, kv_cache_memory="1MiB", enforce_eager=True,
        progress=False, **settings,
    )  # fmt: skip


@pytest.fixture(scope="module")
def llm():
    return start(max_logprobs=-1)


def held(llm: LLM, monkeypatch, **options) -> dict[str, int]:
    """Most arrays of logits or log probabilities [S, V] there before a program of each kind."""
    shape = (ROWS, llm._engine.model_config.vocab_size)
    most: collections.Counter[str] = collections.Counter()
    run = Runner._run

    def run_and_count(self, kind, size, *rest):
        if size in (ROWS, 32):
            found = sum(x.shape == shape and x.dtype == np.float32 for x in jax.live_arrays())
            most[kind] = max(most[kind], found)
        return run(self, kind, size, *rest)

    rows = DeviceLogprobs.rows

    def copied_rows(self):
        # On a CPU the host reads the device's own memory, which it keeps for as long.
        return copy.deepcopy(rows(self))

    options = {"temperature": 0.9, "top_p": 0.9, "max_tokens": 5, "ignore_eos": True} | options
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "_run", run_and_count)
        patch.setattr(DeviceLogprobs, "rows", copied_rows)
        llm.generate([PROMPT] * ROWS, SamplingParams(**options), use_tqdm=False)
    return dict(most)


EDITS = {"logit_bias": {7: 1.0}, "allowed_token_ids": list(range(60))}


def test_the_logits_that_a_runner_holds_are_those_that_are_counted(llm, monkeypatch):
    sampled = held(llm, monkeypatch, logprobs=3, **EDITS)
    prompts = held(llm, monkeypatch, prompt_logprobs=3)
    assert sampled == HELD_LOGITS
    assert prompts == {"rows": 0, "logits": 0, "logprobs": 1, "sample": 1}
    # Five groups of two positions, and one of one.
    assert held(llm, monkeypatch, prompt_logprobs=-1) == prompts


def test_raw_logits_go_where_no_log_probabilities_of_them_are_asked_for(llm, monkeypatch):
    counted = {"logits": 0, "mask": 1, "edit": 1, "sample": 1}
    assert held(llm, monkeypatch, **EDITS) == counted
    processed = start(logprobs_mode="processed_logprobs")
    assert held(processed, monkeypatch, logprobs=3, **EDITS) == counted | {"logprobs": 1}


def test_the_log_probabilities_of_one_step_before_are_held_too(monkeypatch):
    llm = start(async_scheduling=True, max_logprobs=-1)
    found = held(llm, monkeypatch, logprobs=-1, **EDITS)
    assert found == {kind: number + 1 for kind, number in HELD_LOGITS.items()}


def test_each_phase_adds_what_is_held_to_what_the_program_takes():
    results, states, logits, packed, words = 1000, 300, 100, 7, 3
    # Arguments, outputs, temporaries, code; those of forward and logits have parameters in them.
    programs = {
        ProgramKey("forward", 64): ProgramMemory(10**6, states, 2000, 1),
        ProgramKey("logits", 8): ProgramMemory(10**5, logits, 10, 1),
        ProgramKey("mask", 8): ProgramMemory(logits + words, logits, 20, 1),
        ProgramKey("edit", 8, 512): ProgramMemory(logits + packed, logits, 30, 1),
        ProgramKey("sample", 8, 2): ProgramMemory(logits, 1, 40, 1),
        ProgramKey("logprobs", 8, 0): ProgramMemory(logits, 2, 50, 1),
        ProgramKey("logprobs", 8, 1): ProgramMemory(logits, results, 60, 1),
    }
    step = step_memory(programs)
    held = results + states
    assert step.phases == {
        "forward": held + 2000,
        "logits": held + logits + 10,
        "mask": held + 2 * logits + words + 20,
        "edit": held + 3 * logits + packed + 30,
        "sample": held + 2 * logits + packed + 1 + 40,
        "logprobs": held + logits + packed + results + 60,
    }
    assert step.peak == step.phases["forward"]
    assert step.code == 7
    # Where nobody may ask for the whole vocabulary, the most probable tokens are all that is held.
    del programs[ProgramKey("logprobs", 8, 1)]
    assert step_memory(programs).phases["forward"] == 2 + states + 2000


def test_results_of_the_whole_vocabulary_count_where_they_are_allowed(llm):
    config = llm._engine.runner.config
    for allowed in (False, True):
        keys = largest_programs(dataclasses.replace(config, all_logprobs=allowed))
        wanted = [key.variant for key in keys if key.kind == "logprobs"]
        assert wanted == ([0, 1] if allowed else [0])


def test_the_programs_of_an_engine_say_how_large_the_arrays_are(llm):
    programs = llm._engine.runner.programs
    keys = largest_programs(programs.config)
    # 64 tokens and 2048 biased ones a row are more than the smallest bucket, of 64 a row.
    assert ProgramKey("edit", ROWS, ROWS * 1024) in keys
    measured = {key: ProgramMemory.of(programs[key]) for key in keys}
    config = llm._engine.model_config
    by_kind = {(key.kind, key.variant): memory for key, memory in measured.items()}
    logits = 4 * ROWS * config.vocab_size
    for kind, variant in [("logits", 0), ("mask", 0), ("edit", ROWS * 1024)]:
        assert by_kind[kind, variant].outputs == logits
    assert logits < by_kind["logprobs", 1].outputs < 1.1 * logits
    states = 4 * config.hidden_size * (32 + ROWS)
    assert states < by_kind["forward", 0].outputs < 1.5 * states
    assert by_kind["edit", ROWS * 1024].arguments >= logits + 4 * 5 * ROWS * 1024
    assert step_memory(measured).peak >= 3 * logits + states


def test_an_accelerator_gives_the_pool_what_parameters_and_a_step_leave(llm):
    class Device:
        def memory_stats(self):
            return {"bytes_limit": 2 * GIB}

    runner = llm._engine.runner
    config = EngineConfig(gpu_memory_utilization=0.5)
    left = sizing._rest_of(Device(), config, runner.model, runner.programs.plan, runner.config)
    step = step_memory(
        {key: ProgramMemory.of(runner.programs[key]) for key in largest_programs(runner.config)}
    )
    taken = sum(array.nbytes for array in runner.params.values()) + step.peak + step.code
    assert left == GIB - taken - RESERVE_BYTES
