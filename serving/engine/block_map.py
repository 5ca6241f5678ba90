"""What each block of the KV pool is used for, in a form short enough to send often."""

import numpy as np

from jaxllm.engine.block_pool import BlockPool

STATES = ("free", "cached", "used", "shared")


def block_runs(pool: BlockPool) -> list[tuple[str, int]]:
    """(state, count) of neighbours in the same state, from block 1 on; O(pool size).

    "cached" is content that no request holds and that may be evicted, "used" is held by one
    request, "shared" by several. The counts are `pool.num_usable` in all.
    """
    holders = np.asarray(pool.ref_counts[1:])
    cached = np.asarray(pool.cached()[1:])
    states = np.where(holders > 0, 1 + np.minimum(holders, 2), cached)
    starts = np.flatnonzero(np.diff(states, prepend=-1))
    lengths = np.diff(starts, append=len(states))
    return [
        (STATES[state], length)
        for state, length in zip(states[starts].tolist(), lengths.tolist(), strict=True)
    ]
