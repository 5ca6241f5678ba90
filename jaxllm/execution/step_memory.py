"""What a step needs on a device beside parameters and pools, from its largest programs."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jaxllm.execution.batch import TRUNCATED
from jaxllm.execution.logit_edits import entry_buckets
from jaxllm.execution.programs import ProgramKey, RunnerConfig

# Arrays of logits [S, V] that a `Runner` holds while it runs a program, beside what that returns:
# the raw ones, which log probabilities may need later, and the masked or edited ones.
HELD_LOGITS = {"logits": 0, "mask": 1, "edit": 2, "sample": 2, "logprobs": 1}


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramMemory:
    """Bytes on one device of a program's arguments, of its results that are not written into
    arguments, of what it needs while it runs, and of its code."""

    arguments: int
    outputs: int
    temporaries: int
    code: int

    @classmethod
    def of(cls, compiled: jax.stages.Compiled) -> "ProgramMemory":
        analysis: Any = compiled.memory_analysis()
        return cls(
            analysis.argument_size_in_bytes,
            max(analysis.output_size_in_bytes - analysis.alias_size_in_bytes, 0),
            analysis.temp_size_in_bytes,
            analysis.generated_code_size_in_bytes,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes on one device.

    Attributes:
      phases: by kind of program, what is there while it runs beside parameters, pools and code.
      code: of all these programs.
    """

    phases: Mapping[str, int]
    code: int

    @property
    def peak(self) -> int:
        return max(self.phases.values())


def largest_programs(config: RunnerConfig) -> list[ProgramKey]:
    """The programs that `step_memory` asks for, each at its largest bucket.

    But for edits, of which there is room for 1024 different tokens a request (or the one smaller
    bucket there is): the largest bucket holds as many full-length requests as may run, which no
    pool holds.
    """
    rows = config.max_num_seqs
    entries = entry_buckets(rows, config.max_model_len)[:2][-1]
    keys = [
        ProgramKey("forward", config.max_num_batched_tokens),
        ProgramKey("logits", rows),
        ProgramKey("mask", rows),
        ProgramKey("edit", rows, entries),
        ProgramKey("sample", rows, TRUNCATED),
        ProgramKey("logprobs", rows, 0),
    ]
    if config.all_logprobs:
        keys.append(ProgramKey("logprobs", rows, 1))
    return keys


def step_memory(programs: Mapping[ProgramKey, ProgramMemory]) -> StepMemory:
    """The largest step: every row edited, sampled with truncation, and asked for as many log
    probabilities as there may be, while those of the step before are still on their way to the
    host. Two steps run one after the other and share the space of their temporaries.

    A prompt's log probabilities of the whole vocabulary are on the device for one group of S
    positions at a time, before the step samples. Not counted: the most probable tokens at prompt
    positions, and arrays that have neither V nor T in their shape.

    Args:
      programs: those of `largest_programs`.
    """
    forward = next(memory for key, memory in programs.items() if key.kind == "forward")
    logits = next(memory.outputs for key, memory in programs.items() if key.kind == "logits")
    results = max(memory.outputs for key, memory in programs.items() if key.kind == "logprobs")
    # Hidden states, for the log probabilities of prompts.
    held = results + forward.outputs
    # What says how to edit stays until the step is dispatched.
    edits = max(memory.arguments - logits for key, memory in programs.items() if key.kind == "edit")
    phases = {"forward": held + forward.temporaries}
    for key, memory in programs.items():
        if key.kind == "forward":
            continue
        size = held + HELD_LOGITS[key.kind] * logits + memory.outputs + memory.temporaries
        size += memory.arguments - logits if key.kind == "mask" else 0
        size += edits if key.kind in ("edit", "sample", "logprobs") else 0
        phases[key.kind] = max(phases.get(key.kind, 0), size)
    return StepMemory(phases, sum(memory.code for memory in programs.values()))
