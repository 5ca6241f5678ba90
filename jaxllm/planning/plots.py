"""Plots of simulation results; matplotlib is imported when they are asked for."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.planning.results import SimulationResult


def write_plots(results: Sequence[tuple[str, SimulationResult]], folder: Path) -> list[Path]:
    """latency.png (distributions of TTFT and ITL), load.png (KV use, running and waiting over time)
    and knobs.png (throughput against latency, a point per setting); returns their paths.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'jaxllm[bench]'") from None
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, draw in (("latency", _latency), ("load", _load), ("knobs", _knobs)):
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure, results)
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=110)
        paths.append(path)
    return paths


def _latency(figure: Any, results: Sequence[tuple[str, SimulationResult]]) -> None:
    axes = figure.subplots(1, 2)
    for label, result in results:
        gaps, counts = result.gaps()
        for axis, values, weights in (
            (axes[0], result.ttft, np.ones(len(result.ttft))),
            (axes[1], gaps, counts),
        ):
            order = np.argsort(values)
            share = np.cumsum(weights[order]) / max(weights.sum(), 1)
            every = max(len(order) // 2000, 1)
            axis.plot(values[order][::every] * 1e3, share[::every], label=label)
    for axis, title in zip(axes, ("time to first token", "time between tokens"), strict=True):
        axis.set(title=title, xlabel="ms", ylabel="share of requests or tokens", xscale="log")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")


def _load(figure: Any, results: Sequence[tuple[str, SimulationResult]]) -> None:
    axes = figure.subplots(1, 3)
    for label, result in results:
        # The replicas are alike; the first shows the course of things.
        usage = result.usage[0]
        times = np.asarray(usage.times)
        for axis, values in (
            (axes[0], 100 * np.asarray(usage.used) / usage.num_usable),
            (axes[1], np.asarray(usage.running)),
            (axes[2], np.asarray(usage.waiting)),
        ):
            axis.plot(times, values, label=label, linewidth=1)
    for axis, title in zip(
        axes, ("KV blocks in use, %", "requests in a step", "requests waiting"), strict=True
    ):
        axis.set(title=f"{title} (replica 0)", xlabel="seconds")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")


def _knobs(figure: Any, results: Sequence[tuple[str, SimulationResult]]) -> None:
    axes = figure.subplots(1, 2)
    for label, result in results:
        summary = result.summary()
        for axis, value in ((axes[0], summary.ttft.p99), (axes[1], summary.itl.p99)):
            axis.plot(summary.output_tokens_per_second, value * 1e3, "o", label=label)
    for axis, title in zip(axes, ("TTFT p99", "ITL p99"), strict=True):
        axis.set(xlabel="output tokens/s", ylabel=f"{title}, ms", yscale="log")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
