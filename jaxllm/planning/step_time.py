"""How long a step takes: fitted to measured steps, or the planner's roofline."""

import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.execution.buckets import find_bucket


@dataclasses.dataclass(frozen=True, slots=True)
class StepSample:
    """A measured step.

    Attributes:
      prefill_tokens: prompt tokens that ran.
      decode_requests: requests that ran one token.
      context_tokens: tokens those attended to, summed over the requests.
      prefill_pairs: (query, key) pairs of the prompt tokens: a chunk of n tokens after s earlier
        ones has n * s + n * (n + 1) / 2.
      seconds: from the end of the step before it, or from its dispatch after a pause, to its end.
    """

    prefill_tokens: int
    decode_requests: int
    context_tokens: int
    seconds: float
    prefill_pairs: int = 0


class StepTimeModel(Protocol):
    """Seconds of a step from its features, which are those of StepSample."""

    def seconds(
        self,
        prefill_tokens: int,
        decode_requests: int,
        context_tokens: int,
        prefill_pairs: int = 0,
    ) -> float: ...


@dataclasses.dataclass(frozen=True, slots=True)
class LinearStepTime:
    """base + a cost for each feature; no cost is negative, so more work never takes less time.

    Attributes:
      token_buckets: sizes that steps are padded to, ascending; () where nothing is padded.
      padded_token: seconds of a token of the padded step.
    """

    base: float
    prefill_token: float
    decode_request: float
    context_token: float
    prefill_pair: float = 0.0
    padded_token: float = 0.0
    token_buckets: tuple[int, ...] = ()

    def seconds(
        self,
        prefill_tokens: int,
        decode_requests: int,
        context_tokens: int,
        prefill_pairs: int = 0,
    ) -> float:
        """See StepTimeModel."""
        total = (
            self.base
            + self.prefill_token * prefill_tokens
            + self.decode_request * decode_requests
            + self.context_token * context_tokens
            + self.prefill_pair * prefill_pairs
        )
        if self.token_buckets:
            tokens = prefill_tokens + decode_requests
            total += self.padded_token * _padded(tokens, self.token_buckets)
        return total


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """A fitted model and how well it meets the samples.

    Attributes:
      mean_error: |predicted - measured| summed over the samples, over the measured sum.
      total_error: predicted sum over measured sum, minus 1.
    """

    model: LinearStepTime
    num_samples: int
    mean_error: float
    total_error: float


def fit_step_time(samples: Sequence[StepSample], token_buckets: Sequence[int] = ()) -> Fit:
    """Non-negative least squares of seconds over the features.

    The few features allow the exact solution: every subset is solved without the constraint, and
    the best one whose costs are all non-negative is taken. A step slower than ten times its
    neighbours in size (a compile, a pause of the machine) is left out.

    Args:
      token_buckets: sizes that steps are padded to, if they are.

    Raises:
      ConfigError: fewer than 8 samples, or one that is not finite and positive.
    """
    if len(samples) < 8:
        raise ConfigError(f"{len(samples)} step samples: at least 8 are needed for a fit")
    buckets = tuple(sorted(token_buckets))
    rows = np.array([_features(sample, buckets) for sample in samples], np.float64)
    seconds = np.array([sample.seconds for sample in samples], np.float64)
    if not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise ConfigError("step samples: seconds must be finite and positive")
    kept = _without_outliers(rows, seconds)
    rows, seconds = rows[kept], seconds[kept]
    costs = _non_negative_least_squares(rows, seconds)
    names = [field.name for field in dataclasses.fields(LinearStepTime)]
    values: dict[str, Any] = dict(zip(names[:-1], costs.tolist(), strict=True))
    model = LinearStepTime(**values, token_buckets=buckets)
    predicted = rows @ costs
    return Fit(
        model,
        int(kept.sum()),
        float(np.abs(predicted - seconds).sum() / seconds.sum()),
        float(predicted.sum() / seconds.sum() - 1),
    )


def read_samples(path: Path) -> tuple[list[StepSample], tuple[int, ...]]:
    """Samples and token buckets of a benchmark's JSON.

    The file is an object with "samples", a list of objects with the fields of StepSample
    (prefill_pairs may be missing), and perhaps "token_buckets", a list of sizes. Other keys are
    ignored, so that a benchmark may carry its samples in its own report.

    Raises:
      ConfigError: the file is not such JSON; the message names the sample and the field.
    """
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("samples"), list):
        raise ConfigError(f'{path}: an object with a list "samples" is needed')
    samples = [_sample(entry, f"{path}: sample {i}") for i, entry in enumerate(content["samples"])]
    buckets = content.get("token_buckets", [])
    if not isinstance(buckets, list) or not all(_is_count(b) and b > 0 for b in buckets):
        raise ConfigError(f'{path}: "token_buckets" must be a list of positive integers')
    return samples, tuple(buckets)


def write_samples(
    path: Path, samples: Sequence[StepSample], token_buckets: Sequence[int] = ()
) -> None:
    """Writes what read_samples reads."""
    content = {
        "samples": [dataclasses.asdict(sample) for sample in samples],
        "token_buckets": list(token_buckets),
    }
    path.write_text(json.dumps(content))


def _sample(entry: Any, where: str) -> StepSample:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: {entry!r} is not an object")
    counts: dict[str, Any] = {}
    for name in ("prefill_tokens", "decode_requests", "context_tokens", "prefill_pairs"):
        value = entry.get(name, 0 if name == "prefill_pairs" else None)
        if not _is_count(value):
            raise ConfigError(f"{where}: {name}={value!r} must be an integer of at least 0")
        counts[name] = value
    seconds = entry.get("seconds")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ConfigError(f"{where}: seconds={seconds!r} must be a positive number")
    return StepSample(**counts, seconds=float(seconds))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _padded(tokens: int, buckets: tuple[int, ...]) -> int:
    return find_bucket(buckets, tokens) if tokens <= buckets[-1] else tokens


def _features(sample: StepSample, buckets: tuple[int, ...]) -> tuple[float, ...]:
    """In the order of LinearStepTime's fields."""
    features = (
        1,
        sample.prefill_tokens,
        sample.decode_requests,
        sample.context_tokens,
        sample.prefill_pairs,
    )
    tokens = sample.prefill_tokens + sample.decode_requests
    return (*features, _padded(tokens, buckets) if buckets else 0)


def _without_outliers(rows: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """bool [samples]: False for a step over ten times the median of the 15 nearest in tokens."""
    order = np.lexsort((rows[:, 3], rows[:, 1] + rows[:, 2]))
    kept = np.ones(len(seconds), bool)
    for place, index in enumerate(order):
        low = max(min(place - 7, len(order) - 15), 0)
        kept[index] = seconds[index] <= 10 * np.median(seconds[order[low : low + 15]])
    return kept


def _non_negative_least_squares(rows: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    scale = np.abs(rows).max(axis=0)
    used = [i for i in range(rows.shape[1]) if scale[i] > 0]
    best, best_error = np.zeros(rows.shape[1]), math.inf
    for size in range(1, len(used) + 1):
        for subset in itertools.combinations(used, size):
            columns = list(subset)
            solved, *_ = np.linalg.lstsq(rows[:, columns] / scale[columns], seconds, rcond=None)
            if (solved < 0).any():
                continue
            error = float(np.square(rows[:, columns] / scale[columns] @ solved - seconds).sum())
            if error < best_error * (1 - 1e-9):
                best_error = error
                best = np.zeros(rows.shape[1])
                best[columns] = solved / scale[columns]
    return best
