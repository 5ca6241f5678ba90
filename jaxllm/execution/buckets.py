"""Buckets: the few padded shapes that programs are compiled for."""

import bisect
from collections.abc import Sequence

SMALLEST_TOKEN_BUCKET = 16


def decode_buckets(max_num_seqs: int) -> list[int]:
    """Numbers of requests: powers of two, from 64 on with steps of 1.5 between, up to the limit."""
    return _up_to(max_num_seqs, start=1, halves_from=64)


def coarse_buckets(buckets: Sequence[int]) -> list[int]:
    """Every other bucket, the largest included: for programs that are dear to compile and cheap to
    pad."""
    return list(buckets[::-1][::2])[::-1]


def token_buckets(max_num_batched_tokens: int) -> list[int]:
    """Numbers of tokens: powers of two from 16, from 256 on with steps of 1.5 between."""
    return _up_to(max_num_batched_tokens, start=SMALLEST_TOKEN_BUCKET, halves_from=256)


def find_bucket(buckets: Sequence[int], size: int) -> int:
    """The smallest bucket that holds `size`.

    Raises:
      ValueError: size is above the largest bucket.
    """
    i = bisect.bisect_left(buckets, size)
    if i == len(buckets):
        raise ValueError(f"size {size} is above the largest bucket {buckets[-1]}")
    return buckets[i]


def _up_to(limit: int, start: int, halves_from: int) -> list[int]:
    sizes = []
    size = start
    while size < limit:
        sizes.append(size)
        if size >= halves_from and size * 3 // 2 < limit:
            sizes.append(size * 3 // 2)
        size *= 2
    return [*sizes, limit]
