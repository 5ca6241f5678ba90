"""Runs of several engines as rows and as a Markdown table, and the machine they ran on."""

import platform
import statistics
from pathlib import Path
from typing import Any

from benchmarks.compare.engine_process import EngineFailedError


def common_share(ours: list[list[int]], reference: list[list[int]]) -> float:
    """Tokens before the first difference, over all tokens."""
    shared = total = 0
    for a, b in zip(ours, reference, strict=True):
        differs = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        shared, total = shared + differs, total + len(a)
    return shared / total


def summarise(runs: list[dict[str, Any]], reference: str) -> list[dict[str, Any]]:
    """One row per workload and engine."""
    rows = []
    for workload in dict.fromkeys(run["workload"] for run in runs):
        mine = [run for run in runs if run["workload"] == workload]
        digests = {(run["round"], run["prompts_digest"]) for run in mine}
        if len(digests) != len({number for number, _ in digests}):
            raise EngineFailedError(f"{workload}: the engines were given different prompts")
        engines = {name: [r for r in mine if r["engine"] == name] for name in
                   dict.fromkeys(run["engine"] for run in mine)}  # fmt: skip
        base = engines.get(reference)
        for name, own in engines.items():
            speeds = [run["tok_per_s"] for run in own]
            row = {
                "workload": workload,
                "engine": name,
                "dtype": own[0]["dtype"],
                "runs": len(own),
                "median": statistics.median(speeds),
                "least": min(speeds),
                "most": max(speeds),
                "startup_s": own[0]["startup_s"],
                "threads": own[0]["threads"],
                "versions": own[0]["versions"],
            }
            if base is not None:
                row["ratio"] = row["median"] / statistics.median(r["tok_per_s"] for r in base)
                row["agreement"] = common_share(own[0]["outputs"], base[0]["outputs"])
            rows.append(row)
    return rows


def markdown(rows: list[dict[str, Any]], reference: str) -> str:
    lines = [
        f"| workload | engine | dtype | runs | output tok/s, median (least to most) "
        f"| times {reference} | agreement | start-up, s | threads | versions |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = f"{row['ratio']:.2f}" if "ratio" in row else ""
        agreement = f"{row['agreement']:.2f}" if "agreement" in row else ""
        versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        lines.append(
            f"| {row['workload']} | {row['engine']} | {row['dtype']} | {row['runs']} "
            f"| {row['median']:.1f} ({row['least']:.1f} to {row['most']:.1f}) | {ratio} "
            f"| {agreement} | {row['startup_s']:.0f} | {row['threads']} | {versions} |"
        )
    return "\n".join(lines) + "\n"


def processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    models = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    wide = [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f" {f}" in flags]
    return f"{models[0] if models else platform.machine()} ({' '.join(wide)})"
