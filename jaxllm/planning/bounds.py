"""The roofline at a few sizes of step: what a plan shows of the speed."""

import dataclasses

from jaxllm.planning.roofline import Roofline


@dataclasses.dataclass(frozen=True, slots=True)
class DecodePoint:
    """A decode step at the roofline: `batch` requests of `context` tokens each.

    Attributes:
      seconds: least time of the step.
      tokens_per_second: of all requests together, at most.
      bound: "memory" or "compute".
    """

    batch: int
    context: int
    seconds: float
    tokens_per_second: float
    bound: str


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillPoint:
    """A step of `tokens` prompt tokens of one request at the roofline."""

    tokens: int
    seconds: float
    tokens_per_second: float


def decode_points(
    roofline: Roofline | None, seqs: int, capacity: int, limit: int
) -> tuple[DecodePoint, ...]:
    """Batches up to `seqs` at contexts up to `limit`, as far as `capacity` tokens hold them."""
    if roofline is None:
        return ()
    points = []
    for context in sorted({min(c, limit) for c in (1024, 8192, 32768)}):
        for batch in sorted({1, 8, 32, 128, seqs}):
            if batch <= seqs and batch * context <= capacity:
                seconds = roofline.seconds(0, batch, batch * context)
                bound = roofline.bound_by(batch, batch * context)
                points.append(DecodePoint(batch, context, seconds, batch / seconds, bound))
    return tuple(points)


def prefill_points(roofline: Roofline | None, budget: int) -> tuple[PrefillPoint, ...]:
    """Steps up to `budget` tokens."""
    if roofline is None:
        return ()
    points = []
    for tokens in sorted({256, 1024, 4096, budget}):
        if tokens <= budget:
            seconds = roofline.seconds(tokens, 0, 0, tokens * (tokens + 1) // 2)
            points.append(PrefillPoint(tokens, seconds, tokens / seconds))
    return tuple(points)
