"""The oracle: paged attention in numpy float64, one query row at a time, as on paper.

It shares no code with any implementation, so that agreement means something. Slow on purpose.
"""

import numpy as np


def paged_attention(
    q: np.ndarray,
    k_pool: np.ndarray,
    v_pool: np.ndarray,
    block_tables: np.ndarray,
    context_lens: np.ndarray,
    query_starts: np.ndarray,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
    k_scale: np.ndarray | float | None = None,
    v_scale: np.ndarray | float | None = None,
    kv_dtype: np.dtype | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(out [T, H, D], lse [T, H]) in float64; arguments as in api.paged_attention, as numpy arrays.

    Softmax over z_j = cap * tanh(scale * q.k_j / cap), with exp(sink) added to the denominator
    where there are sinks; lse is the logarithm of that denominator. A row without a request is
    zero, its lse minus infinity.
    """
    if kv_dtype is not None:
        k_pool, v_pool = k_pool.view(kv_dtype), v_pool.view(kv_dtype)
    tokens, heads, dim = q.shape
    kv_heads, block_size = k_pool.shape[1], k_pool.shape[2]
    k_factor = np.ones(kv_heads) * (1.0 if k_scale is None else np.asarray(k_scale, np.float64))
    v_factor = np.ones(kv_heads) * (1.0 if v_scale is None else np.asarray(v_scale, np.float64))
    out = np.zeros((tokens, heads, dim))
    lse = np.full((tokens, heads), -np.inf)
    for r, context in enumerate(np.asarray(context_lens)):
        first, last = int(query_starts[r]), int(query_starts[r + 1])
        if first == last:
            continue
        slots = [(block_tables[r, p // block_size], p % block_size) for p in range(context)]
        keys = np.stack([k_pool[b, :, o] for b, o in slots]).astype(np.float64) * k_factor[:, None]
        values = (
            np.stack([v_pool[b, :, o] for b, o in slots]).astype(np.float64) * v_factor[:, None]
        )
        for row in range(first, last):
            position = context - (last - row)
            start = 0 if window is None else max(0, position - window + 1)
            for head in range(heads):
                kv_head = head * kv_heads // heads
                z = keys[start : position + 1, kv_head] @ q[row, head].astype(np.float64) * scale
                if soft_cap is not None:
                    z = soft_cap * np.tanh(z / soft_cap)
                sink = -np.inf if sinks is None else float(sinks[head])
                peak = max(z.max(), sink)
                weights = np.exp(z - peak)
                denominator = weights.sum() + np.exp(sink - peak)
                out[row, head] = weights @ values[start : position + 1, kv_head] / denominator
                lse[row, head] = peak + np.log(denominator)
    return out, lse


def write_kv(rows: np.ndarray, pool: np.ndarray, slots: np.ndarray, block_size: int) -> np.ndarray:
    """A copy of `pool` [P, K, B, D] with row t of `rows` [T, K, D] written at slots[t].

    Slots of block 0 are skipped.
    """
    pool = pool.copy()
    for row, slot in zip(rows, slots, strict=True):
        if slot >= block_size:
            pool[slot // block_size, :, slot % block_size] = row
    return pool
