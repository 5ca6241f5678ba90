"""Plots of a sweep."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def write_plots(rows: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """ttft_itl.png and throughput_latency.png, a line per token budget with a point per
    concurrency; returns their paths."""
    plots = (
        (
            "ttft_itl.png",
            ("p99_itl_ms", "gap between tokens, p99, ms"),
            (("median_ttft_ms", "TTFT, median, ms"), ("p99_ttft_ms", "TTFT, p99, ms")),
        ),
        (
            "throughput_latency.png",
            ("output_throughput", "output tokens/s"),
            (("median_itl_ms", "gap between tokens, median, ms"), ("median_e2el_ms", "E2E, ms")),
        ),
    )
    paths = []
    for name, across, up in plots:
        figure = Figure(figsize=(11, 4.4), layout="constrained")
        FigureCanvasAgg(figure)
        for axes, value in zip(figure.subplots(1, 2), up, strict=True):
            _draw(axes, rows, across, value)
        path = folder / name
        figure.savefig(path, dpi=110)
        paths.append(path)
    return paths


def _draw(
    axes: Any, rows: Sequence[Mapping[str, Any]], across: tuple[str, str], up: tuple[str, str]
) -> None:
    for budget in dict.fromkeys(row["max_num_batched_tokens"] for row in rows):
        line = sorted(
            (row for row in rows if row["max_num_batched_tokens"] == budget),
            key=lambda row: row["max_concurrency"],
        )
        xs, ys = [row[across[0]] for row in line], [row[up[0]] for row in line]
        axes.plot(xs, ys, "o-", label=f"budget {budget}", linewidth=1)
        for row, x, y in zip(line, xs, ys, strict=True):
            place = {"textcoords": "offset points", "xytext": (4, 4), "fontsize": "x-small"}
            axes.annotate(f"{row['max_concurrency']}", (x, y), **place)
    axes.set(xlabel=across[1], ylabel=up[1], xlim=(0, None), ylim=(0, None))
    axes.set_title("numbers: requests at once", fontsize="small")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
