"""Simulation results as a table."""

from collections.abc import Sequence

from jaxllm.planning.results import SimulationResult

_TITLES = (
    "setting", "done", "refused", "req/s", "out tok/s", "TTFT p50", "p99", "ITL p50", "p99",
    "batch", "KV mean", "peak", "preempt", "prefix", "busy",
)  # fmt: skip


def render_results(results: Sequence[tuple[str, SimulationResult]]) -> str:
    """One row per (setting, result): times in milliseconds, shares in per cent."""
    rows = [_TITLES]
    for label, result in results:
        s = result.summary()
        rows.append(
            (
                label,
                f"{s.num_finished}",
                f"{s.num_refused}",
                f"{s.requests_per_second:.2f}",
                f"{s.output_tokens_per_second:.0f}",
                f"{s.ttft.p50 * 1e3:.0f}",
                f"{s.ttft.p99 * 1e3:.0f}",
                f"{s.itl.p50 * 1e3:.1f}",
                f"{s.itl.p99 * 1e3:.1f}",
                f"{s.batch_mean:.1f}",
                f"{s.kv_usage_mean:.1%}",
                f"{s.kv_usage_peak:.1%}",
                f"{s.preemptions}",
                f"{s.prefix_hit_rate:.1%}",
                f"{s.busy:.1%}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(_TITLES))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells))
    simulated = sum(result.summary().duration for _, result in results)
    wall = sum(result.wall_seconds for _, result in results)
    lines.append(f"times in ms; {simulated:.0f} s simulated in {wall:.1f} s")
    return "\n".join(lines)
