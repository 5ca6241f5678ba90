"""A plan as text for people and as JSON for programs."""

import dataclasses
import json

from jaxllm.planning.arithmetic import GIB
from jaxllm.planning.plan import Plan


def render_json(plan: Plan) -> str:
    """Every field of the plan under its name, indented."""
    return json.dumps(dataclasses.asdict(plan), indent=2)


def render_table(plan: Plan) -> str:
    """The plan as aligned text: sizes, capacity, knobs with reasons, bounds, notes."""
    devices = f"{plan.tensor_parallel_size} x {plan.device}"
    kinds = f"weights {plan.quantization or plan.dtype}, KV cache {plan.kv_cache_dtype}"
    lines = [f"{plan.model} on {devices}: {kinds}", ""]
    per_device = " per device" if plan.tensor_parallel_size > 1 else ""
    rows = [("parameters", f"{plan.num_params / 1e9:.2f} billion")]
    if plan.memory_bytes is not None:
        rows.append((f"memory{per_device}", _gib(plan.memory_bytes)))
    rows += [
        (f"weights{per_device}", _gib(plan.weight_bytes)),
        ("memory of a step", f"{_gib(plan.activation_bytes)} ({plan.activation_source})"),
        ("reserve", _gib(plan.reserve_bytes)),
        (f"KV pool{per_device}", _gib(plan.pool_bytes)),
        (f"KV of a token{per_device}", f"{plan.kv_bytes_per_token:,} bytes"),
        ("tokens in the pool", f"{plan.num_tokens:,} ({plan.num_blocks} blocks of "
         f"{plan.block_size}, one of them null)"),
        ("longest request that fits", f"{plan.largest_context:,} tokens"),
        ("full-length requests", f"{plan.full_length_requests:.1f} of {plan.max_model_len:,}"),
        ("smallest tensor parallel size",
         "none up to 64" if plan.smallest_tp is None else str(plan.smallest_tp)),
    ]  # fmt: skip
    lines += _aligned(rows)
    if not plan.fits:
        lines += ["", "DOES NOT FIT: not one request of that length has room."]
    lines += ["", "Recommended settings"]
    lines += _aligned(
        [(f"--{k.name.replace('_', '-')}", f"{k.value:g}".rjust(8) if isinstance(k.value, float)
          else str(k.value).rjust(8)) for k in plan.knobs],
        [k.reason for k in plan.knobs],
    )  # fmt: skip
    if plan.decode:
        lines += ["", "Decode, at most (roofline)"]
        lines += _columns(
            ("requests", "context", "ms a step", "tokens/s", "bound by"),
            [
                (f"{p.batch}", f"{p.context}", f"{p.seconds * 1e3:.2f}",
                 f"{p.tokens_per_second:,.0f}", p.bound)
                for p in plan.decode
            ],
        )  # fmt: skip
    if plan.prefill:
        lines += ["", "Prefill, at most (roofline)"]
        lines += _columns(
            ("tokens", "ms a step", "tokens/s"),
            [
                (f"{p.tokens}", f"{p.seconds * 1e3:.1f}", f"{p.tokens_per_second:,.0f}")
                for p in plan.prefill
            ],
        )
    if plan.notes:
        lines += ["", *(f"note: {note}" for note in plan.notes)]
    return "\n".join(lines)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def _aligned(rows: list[tuple[str, str]], comments: list[str] | None = None) -> list[str]:
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {value}" for name, value in rows]
    if comments:
        lines = [f"{line}  {why}" for line, why in zip(lines, comments, strict=True)]
    return lines


def _columns(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    table = [titles, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(titles))]
    return [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in table
    ]
