"""Bars of the engines' speeds, as PNG."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def plot_offline(rows: list[dict[str, Any]], path: Path) -> None:
    """Output tokens per second of every workload and engine: median, with least and most."""
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    if not workloads:
        return
    figure, axes = plt.subplots(1, len(workloads), figsize=(3 * len(workloads), 3.2), squeeze=False)
    for axis, workload in zip(axes[0], workloads, strict=True):
        mine = [row for row in rows if row["workload"] == workload]
        names = [f"{row['engine']}\n{row['dtype']}" for row in mine]
        medians = [row["median"] for row in mine]
        below = [row["median"] - row["least"] for row in mine]
        above = [row["most"] - row["median"] for row in mine]
        axis.bar(names, medians, yerr=[below, above], capsize=4)
        axis.set_title(workload)
        axis.tick_params(axis="x", labelsize=7)
    axes[0][0].set_ylabel("output tokens per second")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
