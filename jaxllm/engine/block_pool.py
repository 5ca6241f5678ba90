"""BlockPool: which KV blocks are free, shared and cached. Every operation is O(1) a block."""

from collections.abc import Iterable, Sequence

NULL_BLOCK = 0


class BlockPool:
    """Reference counts, the free list and the prefix-cache index of `num_blocks` KV blocks.

    Block 0 is the null block: padding writes go there and it is never handed out, so
    num_blocks - 1 blocks are usable. The free list is a doubly linked list held in two arrays,
    so that a cached block can leave it from the middle. Blocks are taken from its head. A
    released block that is in the cache goes to the tail (least recently used is evicted first);
    one that is not goes to the head and is reused at once. A block in the free list keeps its
    cache entry until it is taken.

    At most one block stands in the index for a hash; a second block with the same content stays
    unindexed.
    """

    def __init__(self, num_blocks: int, enable_caching: bool = True):
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}: at least 2 (block 0 is the null block)")
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.ref_counts = [0] * num_blocks
        self.num_free = num_blocks - 1
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        # The null block's place in the arrays serves as the list's sentinel.
        self._next = [(block + 1) % num_blocks for block in range(num_blocks)]
        self._prev = [(block - 1) % num_blocks for block in range(num_blocks)]

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - self.num_free

    @property
    def usage(self) -> float:
        """Share of the usable blocks that requests hold, 0 to 1."""
        return self.num_used / self.num_usable

    def take(self, count: int) -> list[int]:
        """Hands out `count` blocks with reference count 1, evicting cached content.

        Raises:
          ValueError: fewer than `count` blocks are free; nothing is changed.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked, {self.num_free} free")
        blocks = []
        for _ in range(count):
            block = self._next[NULL_BLOCK]
            self._unlink(block)
            block_hash = self._hashes[block]
            if block_hash is not None:
                self._hashes[block] = None
                del self._index[block_hash]
            self.ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a reference to cached blocks, taking the unreferenced ones off the free list."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                self._unlink(block)
            self.ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drops a reference to each block of a sequence, its last block first.

        The order makes the end of a sequence be evicted before its beginning, which other
        sequences are likelier to share.
        """
        for block in reversed(blocks):
            count = self.ref_counts[block] - 1
            if count < 0 or block == NULL_BLOCK:
                raise ValueError(f"block {block} released more often than it was taken")
            self.ref_counts[block] = count
            if count == 0:
                head = NULL_BLOCK if self._hashes[block] is None else self._prev[NULL_BLOCK]
                self._link_after(head, block)

    def lookup(self, block_hash: bytes) -> int | None:
        """The block that holds this content, or None."""
        return self._index.get(block_hash)

    def register(self, block: int, block_hash: bytes) -> None:
        """Offers a full block to the cache; a hash that is already there stays as it is."""
        if self.enable_caching and block_hash not in self._index and self._hashes[block] is None:
            self._hashes[block] = block_hash
            self._index[block_hash] = block

    def cached(self) -> list[bool]:
        """Per block, whether its content can be found by its hash: O(pool size), for views."""
        return [block_hash is not None for block_hash in self._hashes]

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of these (cached) blocks stand in the free list."""
        return sum(self.ref_counts[block] == 0 for block in blocks)

    def reset_cache(self) -> bool:
        """Forgets all cached content; refused (False) while any block is in use."""
        if self.num_used:
            return False
        self._index.clear()
        self._hashes = [None] * self.num_blocks
        return True

    def free_list(self) -> list[int]:
        """Free blocks in the order they would be taken: O(pool size), for tests and views."""
        blocks = []
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            blocks.append(block)
            block = self._next[block]
        return blocks

    def check(self) -> None:
        """Raises RuntimeError if the free list, counts and index disagree: O(pool size)."""
        free = self.free_list()
        members = set(free)
        if len(members) != len(free) or len(free) != self.num_free:
            raise RuntimeError(f"free list has {len(free)} entries, num_free={self.num_free}")
        for block in range(1, self.num_blocks):
            if (self.ref_counts[block] == 0) != (block in members):
                raise RuntimeError(f"block {block}: ref count {self.ref_counts[block]}")
        indexed = {block: h for block, h in enumerate(self._hashes) if h is not None}
        if {h: block for block, h in indexed.items()} != self._index:
            raise RuntimeError("prefix index and block hashes disagree")

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self.num_free -= 1

    def _link_after(self, before: int, block: int) -> None:
        after = self._next[before]
        self._next[before] = block
        self._prev[block] = before
        self._next[block] = after
        self._prev[after] = block
        self.num_free += 1
