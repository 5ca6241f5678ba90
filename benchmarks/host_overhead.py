"""Host time per step: schedule, pack and update, with a device that does nothing.

    python -m benchmarks.host_overhead [--running 256] [--waiting 0 10000] [--steps 300]

Prints one JSON line per number of waiting requests: the median and the 90th percentile, in
milliseconds, of a decode step of `running` requests, split into its parts. The counts alternate in
one run, so their ratio means something on a noisy machine.
"""

import argparse
import json
import platform
import statistics
import time

import numpy as np

from jaxllm.engine.core import EngineCore
from jaxllm.engine.request import Request
from jaxllm.engine.scheduler import SchedulerConfig
from jaxllm.engine.step_plan import StepPlan, StepResult
from jaxllm.execution.batch import BatchLayout, BatchPacker
from jaxllm.sampling_params import SamplingParams

BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048


class NoDevice:
    """Packs every step as the runner does, and answers with zeros."""

    def __init__(self, num_slots: int):
        width = MAX_MODEL_LEN // BLOCK_SIZE
        self.packer = BatchPacker(num_slots, width, BLOCK_SIZE, 50000)
        self.layouts = {
            tokens: BatchLayout(num_slots, tokens, num_slots, width) for tokens in (num_slots, 8192)
        }
        self.seconds = 0.0

    def dispatch(self, plan: StepPlan) -> "NoDevice":
        began = time.perf_counter()
        size = next(tokens for tokens in self.layouts if tokens >= plan.num_tokens)
        self.packer.pack(plan, self.layouts[size])
        self.seconds = time.perf_counter() - began
        self.num_sampled = plan.num_sampled
        return self

    def result(self) -> StepResult:
        return StepResult(np.full(self.num_sampled, 5, np.int32))

    def reset(self) -> None:
        self.packer.reset()


def make_core(running: int, waiting: int) -> EngineCore:
    config = SchedulerConfig(running, 8192, MAX_MODEL_LEN, BLOCK_SIZE)
    num_blocks = running * MAX_MODEL_LEN // BLOCK_SIZE + 1
    core = EngineCore(config, NoDevice(running), num_blocks=num_blocks)
    params = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
    for i in range(running + waiting):
        prompt = [i % 50000, *range(31)]
        core.add(Request(str(i), prompt, params, max_model_len=MAX_MODEL_LEN))
    while len(core.scheduler.running) < running or core.scheduler.running[-1].num_output_tokens < 2:
        core.step()
    return core


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 10000])
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    cores = {waiting: make_core(arguments.running, waiting) for waiting in arguments.waiting}
    totals: dict[int, list[float]] = {waiting: [] for waiting in cores}
    packs: dict[int, list[float]] = {waiting: [] for waiting in cores}
    for _ in range(arguments.steps):
        for waiting, core in cores.items():
            began = time.perf_counter()
            core.step()
            totals[waiting].append((time.perf_counter() - began) * 1e3)
            packs[waiting].append(core.runner.seconds * 1e3)
    for waiting in cores:
        deciles = statistics.quantiles(totals[waiting], n=10)
        record = {
            "running": arguments.running,
            "waiting": waiting,
            "steps": arguments.steps,
            "step_ms_median": round(statistics.median(totals[waiting]), 3),
            "step_ms_p90": round(deciles[-1], 3),
            "pack_ms_median": round(statistics.median(packs[waiting]), 3),
            "python": platform.python_version(),
        }
        print(json.dumps(record))


if __name__ == "__main__":
    main()
