"""Prefix cache: content hashes of full blocks, and their use for a request.

hash(block i) = SHA-256(hash(block i - 1), token ids as little-endian int32, salt of block 0).
The digest of the empty prefix is a fixed constant, so hashes can be compared across processes.
"""

import hashlib
import struct

import numpy as np

from jaxllm.engine.block_pool import BlockPool
from jaxllm.engine.request import Request

ROOT_HASH = hashlib.sha256(b"jaxllm prefix cache, version 1").digest()


def hash_block(parent: bytes, token_ids: list[int], salt: str | None = None) -> bytes:
    """Digest (32 bytes) of one full block after `parent`; `salt` belongs to a first block only.

    The salt follows its length, so no salt can imitate tokens or another salt.
    """
    extra = b"" if salt is None else salt.encode()
    header = struct.pack("<iq", len(token_ids), -1 if salt is None else len(extra))
    tokens = np.asarray(token_ids, "<i4").tobytes()
    return hashlib.sha256(parent + header + tokens + extra).digest()


def extend_block_hashes(request: Request, block_size: int) -> None:
    """Hashes the full blocks of `request.token_ids` that have no hash yet."""
    hashes = request.block_hashes
    for i in range(len(hashes), request.num_tokens // block_size):
        parent = hashes[-1] if hashes else ROOT_HASH
        tokens = request.token_ids[i * block_size : (i + 1) * block_size]
        hashes.append(hash_block(parent, tokens, request.cache_salt if i == 0 else None))


def find_cached_prefix(pool: BlockPool, request: Request, block_size: int) -> list[int]:
    """Longest run of cached blocks at the head of the request, not yet referenced for it.

    At most num_tokens - 1 tokens count, since the last one must run to give logits.
    """
    if not pool.enable_caching or not request.reads_prefix_cache:
        return []
    extend_block_hashes(request, block_size)
    blocks = []
    for block_hash in request.block_hashes[: (request.num_tokens - 1) // block_size]:
        block = pool.lookup(block_hash)
        if block is None:
            break
        blocks.append(block)
    return blocks


def register_full_blocks(pool: BlockPool, request: Request, block_size: int) -> None:
    """Offers the request's full, computed blocks of known tokens to the cache."""
    if not pool.enable_caching:
        return
    known = min(request.num_computed_tokens, request.num_tokens) // block_size
    if known <= request.num_registered_blocks:
        return
    extend_block_hashes(request, block_size)
    for i in range(request.num_registered_blocks, known):
        pool.register(request.block_ids[i], request.block_hashes[i])
    request.num_registered_blocks = known
