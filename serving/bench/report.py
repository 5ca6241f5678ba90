"""Results as text and as files."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError
from serving.bench.metrics import METRICS

_TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "itl": "gap between tokens",
    "e2el": "whole request",
}
_LINES = (
    ("completed", "requests answered", "d"),
    ("failed", "requests failed", "d"),
    ("duration", "duration, s", ".2f"),
    ("total_input_tokens", "input tokens", "d"),
    ("total_output_tokens", "output tokens", "d"),
    ("request_throughput", "requests/s", ".2f"),
    ("request_goodput", "good requests/s", ".2f"),
    ("output_throughput", "output tokens/s", ".2f"),
    ("total_token_throughput", "tokens/s in all", ".2f"),
    ("max_output_tokens_per_s", "most pieces of output in a second", ".0f"),
    ("max_concurrent_requests", "most requests open in a second", "d"),
)


def render(result: Mapping[str, Any]) -> str:
    """The figures of a load test as text, a line each, then a table of times in milliseconds."""
    lines = [
        f"{title:<36}{format(result[name], form):>12}"
        for name, title, form in _LINES
        if result.get(name) is not None
    ]
    shown = [name for name in METRICS if f"mean_{name}_ms" in result]
    if shown:
        parts = [key.split("_")[0] for key in result if key.endswith(f"_{shown[0]}_ms")]
        lines += ["", "ms".ljust(40) + "".join(f"{part:>10}" for part in parts)]
        for name in shown:
            values = "".join(f"{result[f'{part}_{name}_ms']:>10.2f}" for part in parts)
            lines.append(f"{name.upper() + ', ' + _TITLES[name]:<40}{values}")
    return "\n".join(lines)


def markdown(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """A table of `columns` (field -> title); floats with three digits that count."""

    def cell(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    lines = [
        "| " + " | ".join(columns.values()) + " |",
        "|" + "---|" * len(columns),
        *("| " + " | ".join(cell(row[name]) for name in columns) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def result_path(
    folder: Path | None,
    filename: str | None,
    *,
    label: str,
    rate: float,
    max_concurrency: int | None,
    model: str,
) -> Path:
    """Where a result goes; without a name it is made of the settings, as vLLM makes it."""
    if filename is None:
        limit = f"-concurrency{max_concurrency}" if max_concurrency else ""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        filename = f"{label}-{rate}qps{limit}-{Path(model).name}-{stamp}.json"
    return (folder or Path()) / filename


def write_json(path: Path, result: Mapping[str, Any], append: bool = False) -> None:
    """Writes a JSON file, or a further line to it; ConfigError where that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if append:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(plain(result)) + "\n")
        else:
            path.write_text(json.dumps(plain(result), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def plain(value: Any) -> Any:
    """The value with infinity as "inf" and nan as null, which JSON has no numbers for."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf"
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
