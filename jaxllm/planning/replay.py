"""A trace through the real engine, in real time: what a simulation is checked against."""

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from jaxllm.engine.core import EngineCore
from jaxllm.engine.request import Request
from jaxllm.errors import ConfigError
from jaxllm.planning.recorder import StepRecorder
from jaxllm.planning.results import Spread
from jaxllm.planning.step_time import StepSample
from jaxllm.planning.trace import TraceRequest
from jaxllm.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class Replay:
    """What the engine did with a trace.

    Attributes:
      arrival, first_token, finish: float64 [requests], seconds since the start; arrivals are those
        of the trace.
      output_tokens: int64 [requests].
      samples: every step.
    """

    arrival: np.ndarray
    first_token: np.ndarray
    finish: np.ndarray
    output_tokens: np.ndarray
    samples: list[StepSample]

    @property
    def ttft(self) -> Spread:
        """Arrival to first token, seconds."""
        return Spread.of(self.first_token - self.arrival)

    @property
    def output_tokens_per_second(self) -> float:
        """From the first arrival to the last token."""
        return float(self.output_tokens.sum() / (self.finish.max() - self.arrival.min()))


def replay(
    core: EngineCore,
    trace: Sequence[TraceRequest],
    *,
    vocab_size: int,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Replay:
    """Sends the trace's requests to `core` when they arrive, and waits for them all.

    Prompts are random tokens, equal where prefixes are shared. Outputs have the lengths of the
    trace: end-of-sequence tokens are ignored.

    Args:
      core: idle; its engine should be warm, or compiles are measured too.
      vocab_size: V.
      seed: of the prompts' tokens.
      clock, sleep: time, in seconds.

    Raises:
      ConfigError: the core has requests, or one of the trace does not fit max_model_len.
      CapacityError: a request can never fit the pool.
    """
    limit = core.config.max_model_len
    for entry in trace:
        if entry.prompt_tokens + entry.output_tokens > limit:
            raise ConfigError(
                f"a request of {entry.prompt_tokens} + {entry.output_tokens} tokens is above "
                f"max_model_len={limit}"
            )
    if core.has_unfinished:
        raise ConfigError("the engine is busy")
    requests = _requests(trace, vocab_size, limit, seed)
    recorder = StepRecorder.install(core, clock)
    first_token = np.full(len(trace), np.nan)
    finish = np.full(len(trace), np.nan)
    output_tokens = np.zeros(len(trace), np.int64)
    sent = 0
    try:
        began = clock()
        while sent < len(trace) or core.has_unfinished:
            now = clock() - began
            while sent < len(trace) and trace[sent].arrival <= now:
                core.add(requests[sent])
                sent += 1
            if not core.has_unfinished:
                # At least a little, or rounding could keep the arrival just out of reach.
                sleep(max(trace[sent].arrival - now, 1e-6))
                continue
            outputs = core.step()
            now = clock() - began
            for output in outputs:
                index = int(output.request_id)
                if not output_tokens[index]:
                    first_token[index] = now
                output_tokens[index] += len(output.new_token_ids)
                if output.finish_reason is not None:
                    finish[index] = now
    finally:
        recorder.uninstall(core)
    arrival = np.array([entry.arrival for entry in trace])
    return Replay(arrival, first_token, finish, output_tokens, recorder.samples)


def _requests(
    trace: Sequence[TraceRequest], vocab_size: int, max_model_len: int, seed: int
) -> list[Request]:
    random = np.random.default_rng(seed)
    prefixes: dict[str, list[int]] = {}
    requests = []
    for index, entry in enumerate(trace):
        tokens: list[int] = random.integers(0, vocab_size, entry.prompt_tokens).tolist()
        if entry.prefix is not None:
            shared = prefixes.setdefault(entry.prefix, [])
            while len(shared) < entry.prefix_tokens:
                shared.append(int(random.integers(0, vocab_size)))
            tokens[: entry.prefix_tokens] = shared[: entry.prefix_tokens]
        params = SamplingParams(
            temperature=0.0, max_tokens=entry.output_tokens, ignore_eos=True, detokenize=False
        )
        requests.append(Request(str(index), tokens, params, max_model_len=max_model_len))
    return requests
