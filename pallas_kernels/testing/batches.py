"""Ragged batches over a poisoned pool, for tests and benchmarks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import oracle
from pallas_kernels.paged_attention.pool import pool_dtype


@dataclass(frozen=True, slots=True)
class Batch:
    """One call's operands as numpy arrays; shapes as in api.paged_attention.

    The pools are in their numbers' type.
    """

    q: np.ndarray
    k_pool: np.ndarray
    v_pool: np.ndarray
    block_tables: np.ndarray
    context_lens: np.ndarray
    query_starts: np.ndarray

    @property
    def live_tokens(self) -> int:
        return int(self.query_starts[-1])

    def operands(self, platform: str | None = None) -> tuple[jax.Array, ...]:
        """The six operands as JAX arrays; with a platform, pools as that platform stores them."""
        stored = pool_dtype(self.k_pool.dtype, platform) if platform else self.k_pool.dtype
        pools = (self.k_pool.view(stored), self.v_pool.view(stored))
        rest = (self.block_tables, self.context_lens, self.query_starts)
        return tuple(jnp.asarray(x) for x in (self.q, *pools, *rest))

    def expected(self, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        """What the oracle says: (out, lse) in float64. Options as in oracle.paged_attention."""
        rest = (self.block_tables, self.context_lens, self.query_starts)
        with np.errstate(all="ignore"):
            return oracle.paged_attention(self.q, self.k_pool, self.v_pool, *rest, **options)


def make_batch(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    block_size: int = 16,
    dtype: str = "float32",
    kv_dtype: str = "float32",
    table_width: int | None = None,
    tokens: int | None = None,
    shared_blocks: int = 0,
    seed: int = 0,
) -> Batch:
    """A batch with random numbers in the live slots and poison in every other slot.

    Poison is NaN, or the least int8. Blocks are shuffled; entries of a table row past its context
    name poisoned blocks; the first `shared_blocks` blocks of every request that has them are the
    same. heads is (H, K). tokens, at least the sum of query_lens, adds padding rows, and context 0
    marks a padding request.
    """
    rng = np.random.default_rng(seed)
    H, K = heads
    live = sum(query_lens)
    blocks_of = [-(-n // block_size) for n in context_lens]
    width = table_width or max(*blocks_of, 1)
    num_blocks = 1 + shared_blocks + sum(blocks_of) + 2
    ids = rng.permutation(np.arange(1, num_blocks))
    shared, free = ids[:shared_blocks], list(ids[shared_blocks:])
    poisoned_blocks = [free.pop(), free.pop(), 0]
    tables = rng.choice(poisoned_blocks, (len(context_lens), width)).astype(np.int32)
    filled = np.zeros((num_blocks, block_size), bool)
    for r, context in enumerate(context_lens):
        for j in range(blocks_of[r]):
            tables[r, j] = shared[j] if j < shared_blocks else free.pop()
            filled[tables[r, j], : min(block_size, context - j * block_size)] = True

    kv_type = jnp.dtype(kv_dtype)
    poison = -128 if kv_type == jnp.int8 else np.nan

    def pool() -> np.ndarray:
        spread = 40.0 if kv_type == jnp.int8 else 1.0
        numbers = rng.standard_normal((num_blocks, K, block_size, head_dim)) * spread
        return np.where(filled[:, None, :, None], numbers, poison).astype(kv_type)

    q = rng.standard_normal((tokens or live, H, head_dim)).astype(jnp.dtype(dtype))
    starts = np.concatenate([[0], np.cumsum(query_lens)])
    return Batch(
        q, pool(), pool(), tables, np.array(context_lens, np.int32), starts.astype(np.int32)
    )
