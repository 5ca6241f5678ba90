"""Traffic: which requests come when, from a file or from distributions."""

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import ConfigError


class TraceError(ConfigError):
    """A trace that cannot be used; the message gives line and field."""


@dataclasses.dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
      arrival: seconds since the start.
      prompt_tokens: length of the prompt.
      output_tokens: tokens it generates, whatever they are.
      prefix: name of the prefix it shares with others, None for a prompt of its own.
      prefix_tokens: leading prompt tokens that belong to the shared prefix.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    prefix: str | None = None
    prefix_tokens: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.arrival) and self.arrival >= 0):
            raise TraceError(f"arrival={self.arrival!r}: a finite number of at least 0")
        for name, low in (("prompt_tokens", 1), ("output_tokens", 1), ("prefix_tokens", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise TraceError(f"{name}={value!r}: an integer of at least {low}")
        if self.prefix is None and self.prefix_tokens:
            raise TraceError(f"prefix_tokens={self.prefix_tokens}: there is no prefix")
        if self.prefix_tokens > self.prompt_tokens:
            raise TraceError(
                f"prefix_tokens={self.prefix_tokens}: above prompt_tokens={self.prompt_tokens}"
            )


def read_trace(path: Path) -> list[TraceRequest]:
    """A JSONL file, one request a line under the names of TraceRequest's fields, by arrival.

    Raises:
      TraceError: a line is not such a request, or the file holds none.
    """
    with path.open(encoding="utf-8") as file:
        return parse_trace(file, str(path))


def parse_trace(lines: Iterable[str], where: str = "trace") -> list[TraceRequest]:
    """See read_trace; empty lines are skipped, and requests sorted by arrival."""
    requests = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            requests.append(_parse_line(line, f"{where}, line {number}"))
    if not requests:
        raise TraceError(f"{where}: no requests")
    requests.sort(key=lambda request: request.arrival)
    return requests


def _parse_line(line: str, where: str) -> TraceRequest:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{where}: not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise TraceError(f"{where}: {entry!r} is not an object")
    names = {field.name for field in dataclasses.fields(TraceRequest)}
    unknown = entry.keys() - names
    if unknown:
        raise TraceError(
            f"{where}: unknown field {sorted(unknown)[0]!r}; known: {', '.join(sorted(names))}"
        )
    missing = {"arrival", "prompt_tokens", "output_tokens"} - entry.keys()
    if missing:
        raise TraceError(f"{where}: no {sorted(missing)[0]!r}")
    arrival, prefix = entry["arrival"], entry.get("prefix")
    if isinstance(arrival, bool) or not isinstance(arrival, (int, float)):
        raise TraceError(f"{where}: arrival={arrival!r} is not a number")
    if prefix is not None and not isinstance(prefix, str):
        raise TraceError(f"{where}: prefix={prefix!r} is not a string")
    try:
        return TraceRequest(**(entry | {"arrival": float(arrival)}))
    except TraceError as error:
        raise TraceError(f"{where}: {error}") from None


@dataclasses.dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens.

    Attributes:
      kind: "fixed" (mean), "uniform" (low to high, both included), or "lognormal" (of this mean,
        and `spread`, the standard deviation of the logarithm; at most high).
    """

    kind: str
    mean: float = 0.0
    low: int = 1
    high: int = 2**31 - 1
    spread: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """From "512", "64:255" (uniform) or "300~0.8" (lognormal: mean ~ spread).

        Raises:
          TraceError: the text is none of these.
        """
        try:
            if ":" in text:
                low, high = (int(part) for part in text.split(":"))
                if not 1 <= low <= high:
                    raise ValueError
                return cls("uniform", (low + high) / 2, low, high)
            if "~" in text:
                mean, spread = (float(part) for part in text.split("~"))
                if not (math.isfinite(mean) and mean >= 1 and 0 < spread < 10):
                    raise ValueError
                return cls("lognormal", mean, spread=spread)
            if int(text) < 1:
                raise ValueError
            return cls("fixed", float(int(text)))
        except ValueError:
            raise TraceError(
                f"length {text!r}: a number (512), a range (64:255) or a mean with the spread of "
                "its logarithm (300~0.8)"
            ) from None

    def draw(self, random: np.random.Generator, count: int, limit: int) -> np.ndarray:
        """int64 [count], from 1 to min(high, limit)."""
        if self.kind == "fixed":
            drawn = np.full(count, int(self.mean))
        elif self.kind == "uniform":
            drawn = random.integers(self.low, self.high, count, endpoint=True)
        else:
            shift = math.log(self.mean) - self.spread**2 / 2
            drawn = np.rint(random.lognormal(shift, self.spread, count)).astype(np.int64)
        return np.clip(drawn, 1, min(self.high, limit))


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """Poisson arrivals with independent lengths, and prefixes shared within groups.

    Attributes:
      rate: requests per second; 0 brings all at once.
      burstiness: shape of the gamma-distributed gaps; 1 is Poisson, less comes in bursts.
      prefix_groups: how many shared prefixes there are; 0 is none.
      prefix_tokens: length of each, added before the drawn prompt.
      most_prompt, most_output: caps of the drawn lengths, tokens.
    """

    num_requests: int
    rate: float
    prompt: Lengths
    output: Lengths
    burstiness: float = 1.0
    prefix_groups: int = 0
    prefix_tokens: int = 0
    seed: int = 0
    most_prompt: int = 2**31 - 1
    most_output: int = 2**31 - 1

    def __post_init__(self) -> None:
        for name, low in (("num_requests", 1), ("prefix_groups", 0), ("prefix_tokens", 0)):
            if getattr(self, name) < low:
                raise TraceError(f"{name}={getattr(self, name)}: at least {low}")
        if not (math.isfinite(self.rate) and self.rate >= 0):
            raise TraceError(f"rate={self.rate}: a finite number of at least 0")
        if not (math.isfinite(self.burstiness) and self.burstiness > 0):
            raise TraceError(f"burstiness={self.burstiness}: a finite number above 0")

    def requests(self) -> Iterator[TraceRequest]:
        """The requests in order of arrival; the same for the same seed."""
        random = np.random.default_rng(self.seed)
        count = self.num_requests
        arrivals = np.zeros(count)
        if self.rate:
            scale = 1 / (self.rate * self.burstiness)
            arrivals = np.cumsum(random.gamma(self.burstiness, scale, count))
        prompts = self.prompt.draw(random, count, self.most_prompt)
        outputs = self.output.draw(random, count, self.most_output)
        shared = bool(self.prefix_groups and self.prefix_tokens)
        groups = random.integers(0, max(self.prefix_groups, 1), count)
        names = [f"prefix {i}" for i in range(self.prefix_groups)]
        for arrival, prompt, output, group in zip(
            arrivals.tolist(), prompts.tolist(), outputs.tolist(), groups.tolist(), strict=True
        ):
            if shared:
                length = self.prefix_tokens
                yield TraceRequest(arrival, length + prompt, output, names[group], length)
            else:
                yield TraceRequest(arrival, prompt, output)
