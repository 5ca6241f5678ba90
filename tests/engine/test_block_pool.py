import pytest

from jaxllm.engine.block_pool import BlockPool


def digest(i: int) -> bytes:
    return bytes([i]) * 32


def test_the_null_block_is_never_handed_out():
    pool = BlockPool(5)
    assert pool.take(4) == [1, 2, 3, 4]
    assert pool.num_free == 0
    with pytest.raises(ValueError, match="1 blocks asked, 0 free"):
        pool.take(1)


def test_a_short_take_changes_nothing():
    pool = BlockPool(5)
    pool.take(3)
    with pytest.raises(ValueError):
        pool.take(2)
    assert pool.num_free == 1
    pool.check()


def test_uncached_blocks_are_reused_first_and_cached_ones_last_from_the_tail():
    pool = BlockPool(8)
    blocks = pool.take(4)
    for block in blocks[:3]:
        pool.register(block, digest(block))
    pool.release(blocks)
    # Block 4 has no content worth keeping; of the sequence 1, 2, 3 the end goes first.
    assert pool.free_list() == [4, 5, 6, 7, 3, 2, 1]


def test_content_survives_until_its_block_is_taken():
    pool = BlockPool(4)
    blocks = pool.take(3)
    pool.register(blocks[0], digest(1))
    pool.release(blocks)
    assert pool.lookup(digest(1)) == blocks[0]
    pool.take(2)
    assert pool.lookup(digest(1)) == blocks[0]
    pool.take(1)
    assert pool.lookup(digest(1)) is None
    pool.check()


def test_sharing_takes_a_block_off_the_middle_of_the_free_list():
    pool = BlockPool(6)
    blocks = pool.take(3)
    for block in blocks:
        pool.register(block, digest(block))
    pool.release(blocks)
    pool.share([2])
    assert pool.free_list() == [4, 5, 3, 1]
    pool.share([2])
    assert pool.ref_counts[2] == 2
    pool.release([2])
    assert 2 not in pool.free_list()
    pool.release([2])
    assert pool.free_list() == [4, 5, 3, 1, 2]
    pool.check()


def test_equal_content_is_indexed_once():
    pool = BlockPool(4)
    first, second = pool.take(2)
    pool.register(first, digest(9))
    pool.register(second, digest(9))
    assert pool.lookup(digest(9)) == first
    pool.release([second])
    assert pool.free_list()[0] == second
    pool.check()


def test_a_double_release_is_an_error():
    pool = BlockPool(4)
    blocks = pool.take(1)
    pool.release(blocks)
    with pytest.raises(ValueError, match="released more often"):
        pool.release(blocks)


def test_reset_is_refused_while_blocks_are_in_use():
    pool = BlockPool(4)
    blocks = pool.take(1)
    pool.register(blocks[0], digest(1))
    assert not pool.reset_cache()
    assert pool.lookup(digest(1)) == blocks[0]
    pool.release(blocks)
    assert pool.reset_cache()
    assert pool.lookup(digest(1)) is None
    pool.check()


def test_disabled_caching_keeps_nothing():
    pool = BlockPool(4, enable_caching=False)
    pool.register(pool.take(1)[0], digest(1))
    assert pool.lookup(digest(1)) is None


def test_usage_counts_usable_blocks():
    pool = BlockPool(5)
    assert pool.usage == 0
    pool.take(2)
    assert pool.usage == 0.5


def test_a_pool_needs_a_usable_block():
    with pytest.raises(ValueError, match="at least 2"):
        BlockPool(1)
