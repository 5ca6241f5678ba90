import pytest

from jaxllm.execution.buckets import coarse_buckets, decode_buckets, find_bucket, token_buckets


def test_buckets_are_powers_of_two_with_halves_where_padding_hurts():
    assert decode_buckets(256) == [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256]
    assert decode_buckets(3) == [1, 2, 3]
    assert decode_buckets(1) == [1]
    assert token_buckets(1024) == [16, 32, 64, 128, 256, 384, 512, 768, 1024]
    assert token_buckets(20) == [16, 20]
    assert token_buckets(5) == [5]


@pytest.mark.parametrize("limit", range(1, 700, 7))
def test_every_size_has_a_bucket_that_at_most_doubles_it(limit):
    buckets = decode_buckets(limit)
    assert buckets[-1] == limit
    for size in range(1, limit + 1):
        assert size <= find_bucket(buckets, size) < 2 * size or size == 1


def test_coarse_buckets_keep_the_largest():
    assert coarse_buckets([1, 2, 4, 8, 16, 32, 64]) == [1, 4, 16, 64]
    assert coarse_buckets([1, 2, 4, 6]) == [2, 6]
    assert coarse_buckets([3]) == [3]


def test_too_large_a_size_is_an_error():
    with pytest.raises(ValueError, match="size 9 is above the largest bucket 8"):
        find_bucket([1, 8], 9)
