"""What each block of the KV pool is used for, in a form short enough to send often."""

import itertools

from jaxllm.engine.block_pool import BlockPool

FREE, CACHED, USED, SHARED = "free", "cached", "used", "shared"


def block_runs(pool: BlockPool) -> list[tuple[str, int]]:
    """(state, count) of neighbours in the same state, from block 1 on; O(pool size).

    "cached" is content that no request holds and that may be evicted, "used" is held by one
    request, "shared" by several. Their counts are `pool.num_usable` in all.
    """
    states = (_state(pool, block) for block in range(1, pool.num_blocks))
    return [(state, sum(1 for _ in run)) for state, run in itertools.groupby(states)]


def _state(pool: BlockPool, block: int) -> str:
    count = pool.ref_counts[block]
    if count:
        return USED if count == 1 else SHARED
    return CACHED if pool.is_cached(block) else FREE
