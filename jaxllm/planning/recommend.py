"""Settings of the four knobs that decide capacity and latency, each with its reason."""

import dataclasses

from jaxllm.execution.buckets import decode_buckets
from jaxllm.planning.arithmetic import GIB
from jaxllm.planning.roofline import Roofline

# Shares of the peak rates that a good engine attains in a step, for turning bounds into estimates.
ATTAINED_COMPUTE = 0.6
ATTAINED_BANDWIDTH = 0.75
STEP_OVERHEAD_S = 0.5e-3

MOST_SEQS = 1024
# A prompt token and a new one.
SHORTEST = 2
TOKEN_BUDGETS = (16384, 8192, 4096, 2048, 1024, 512)
# Share of the memory that one step may take before a smaller budget pays.
TEMPORARIES_SHARE = 0.1
OUTSIDE_BYTES = GIB
OUTSIDE_BYTES_LINKED = 2 * GIB


@dataclasses.dataclass(frozen=True, slots=True)
class Knob:
    """One setting of EngineConfig, its value and why."""

    name: str
    value: float | int
    reason: str


def utilization_knob(memory_bytes: int, tp: int) -> Knob:
    """gpu_memory_utilization: what is left after the allocations that are not XLA's."""
    outside = OUTSIDE_BYTES if tp == 1 else OUTSIDE_BYTES_LINKED
    value = min(int((1 - outside / memory_bytes) * 100) / 100, 0.95)
    value = max(value, 0.05)
    what = "the CUDA context and libraries" + (" and the buffers of NCCL" if tp > 1 else "")
    reason = (
        f"leaves {(1 - value) * memory_bytes / GIB:.1f} of {memory_bytes / GIB:.1f} GiB to {what}, "
        f"which take about {outside / GIB:.0f} GiB, and to fragments"
    )
    return Knob("gpu_memory_utilization", value, reason)


def length_knob(asked: int | None, limit: int, capacity: int) -> Knob:
    """max_model_len: what was asked for, else the model's limit, else what fits.

    Args:
      limit: max_position_embeddings.
      capacity: tokens the pool holds.
    """
    if asked is not None:
        fits = capacity / asked
        return Knob(
            "max_model_len",
            asked,
            f"asked for; the pool holds {fits:.1f} such requests"
            if capacity >= asked - 1
            else f"asked for, but the pool holds only {capacity} tokens: not one such request",
        )
    if capacity >= limit - 1:
        reason = (
            f"the model's own limit; {capacity / limit:.1f} requests of that length fit, and a "
            "long limit costs no KV memory before its tokens come, as blocks are given out as "
            "needed"
        )
        return Knob("max_model_len", limit, reason)
    if capacity < SHORTEST:
        return Knob("max_model_len", limit, "the model's own limit, but no request fits at all")
    return Knob(
        "max_model_len",
        capacity,
        f"all that the pool holds; the model's own limit of {limit} does not fit",
    )


def token_budget_knob(
    roofline: Roofline | None,
    default: int,
    most_step_seconds: float,
    memory_bytes: int | None,
    bytes_per_token: int,
) -> Knob:
    """max_num_batched_tokens: the largest step that running requests can wait for.

    Args:
      default: the engine's own choice, taken where there is no roofline.
      most_step_seconds: longest step a running request should wait for.
      memory_bytes: memory of the device, None where the pool's size is given.
      bytes_per_token: memory of a token in a step.
    """
    if roofline is None:
        return Knob(
            "max_num_batched_tokens",
            default,
            "the engine's default; without the speed of the machine nothing speaks for another",
        )
    real = roofline.attained(ATTAINED_COMPUTE, ATTAINED_BANDWIDTH, STEP_OVERHEAD_S)
    ridge = real.ridge_tokens
    for value in TOKEN_BUDGETS:
        seconds = real.seconds(value, 0, 0, value * value // 2)
        small = memory_bytes is None or value * bytes_per_token <= TEMPORARIES_SHARE * memory_bytes
        if (seconds <= most_step_seconds and small) or value == TOKEN_BUDGETS[-1]:
            break
    reason = (
        f"a step of {value} prompt tokens takes about {seconds * 1e3:.0f} ms, which is what a "
        f"running request waits at most (limit {most_step_seconds * 1e3:.0f} ms), and reads the "
        f"weights once for {value / ridge:.0f} times the {ridge:.0f} tokens from which arithmetic, "
        "not that reading, sets the pace"
    )
    return Knob("max_num_batched_tokens", value, reason)


def seqs_knob(
    roofline: Roofline | None,
    capacity: int,
    mean_context: int,
    target_itl: float,
    budget: int,
    most: int = MOST_SEQS,
) -> Knob:
    """max_num_seqs: as many as memory and the time between tokens allow.

    Args:
      capacity: tokens the pool holds.
      mean_context: tokens a running request holds on average.
      target_itl: seconds between two tokens of a request that decoding should keep.
      budget: max_num_batched_tokens, which must give each running request a token.
      most: the engine's own limit for this kind of machine.
    """
    memory = max(capacity // mean_context, 1)
    limits = {
        f"the pool holds {memory} requests of {mean_context} tokens; more would preempt each "
        "other": memory,
        "no more rows than this are worth a program of their own": most,
        f"a step must give every request a token of its budget of {budget}": budget,
    }
    if roofline is not None:
        real = roofline.attained(ATTAINED_COMPUTE, ATTAINED_BANDWIDTH, STEP_OVERHEAD_S)
        fast = _largest_batch(real, mean_context, target_itl, most)
        step = real.seconds(0, fast, fast * mean_context)
        limits[
            f"a decode step of {fast} requests of {mean_context} tokens takes about "
            f"{step * 1e3:.1f} ms (target {target_itl * 1e3:.0f} ms between tokens)"
        ] = fast
    reason, least = min(limits.items(), key=lambda item: item[1])
    value = max(size for size in decode_buckets(most) if size <= least)
    if value < least:
        reason += "; rounded down to a bucket"
    return Knob("max_num_seqs", value, reason)


def _largest_batch(roofline: Roofline, context: int, seconds: float, most: int) -> int:
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        if roofline.seconds(0, middle, middle * context) <= seconds:
            low = middle
        else:
            high = middle - 1
    return low
