"""Split counts, the merge of the parts, work lists and tile bounds, against what they mean."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention.bounds import tile_bounds
from pallas_kernels.paged_attention.split_plan import merge_splits, num_splits
from pallas_kernels.paged_attention.work_list import decode_rows, prompt_tiles, tiles_of_rows


@pytest.mark.parametrize(
    ("work_items", "max_tiles", "expected"),
    [
        (132, 512, 1),  # the machine is full
        (110, 512, 1),  # full enough
        (1, 4, 1),  # too few tiles to cut
        (66, 512, 2),
        (8, 512, 15),
        (1, 20, 17),  # never more parts than tiles
        (8, 64, 15),
    ],
)
def test_num_splits(work_items, max_tiles, expected):
    assert num_splits(work_items, max_tiles, slots=132) == expected


def test_merge_equals_the_softmax_over_everything():
    rng = np.random.default_rng(0)
    z, v = rng.standard_normal((2, 3, 12)), rng.standard_normal((12, 8))
    sinks = rng.standard_normal(3)
    parts = [slice(0, 5), slice(5, 5), slice(5, 12)]

    def attention(logits, values, extra=-np.inf):
        weights = np.exp(logits)
        total = weights.sum(-1) + np.exp(extra)
        with np.errstate(all="ignore"):
            return np.nan_to_num(weights @ values / total[..., None]), np.log(total)

    out, lse = zip(*(attention(z[..., p], v[p]) for p in parts), strict=True)
    stacked = jnp.stack(out), jnp.stack(lse)
    for given, extra in ((None, -np.inf), (jnp.asarray(sinks), sinks)):
        merged, merged_lse = merge_splits(*stacked, given)
        expected, expected_lse = attention(z, v, extra)
        np.testing.assert_allclose(merged, expected, atol=1e-6)
        np.testing.assert_allclose(merged_lse, expected_lse, atol=1e-6)


def test_merge_of_nothing_is_zero():
    out, lse = merge_splits(jnp.ones((2, 1, 3, 4)), jnp.full((2, 1, 3), -jnp.inf), jnp.zeros(3))
    assert not np.asarray(out).any()
    assert (np.asarray(lse) == -np.inf).all()


@pytest.mark.parametrize("tile", [1, 4, 64])
def test_tiles_cover_every_prompt_row_once(tile):
    lengths = np.array([5, 1, 0, 12, 2, 0])
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    contexts = np.array([9, 4, 0, 12, 7, 0], np.int32)
    T = 24
    work = [
        np.asarray(x) for x in prompt_tiles(jnp.asarray(starts), jnp.asarray(contexts), T, tile)
    ]
    covered = {}
    for item, (request, row, tokens, position) in enumerate(zip(*work, strict=True)):
        assert tokens <= tile
        for i in range(tokens):
            assert row + i not in covered
            covered[row + i] = item
            assert starts[request] <= row + i < starts[request + 1]
            assert position + i == contexts[request] - starts[request + 1] + row + i
    expected = {t for r, n in enumerate(lengths) if n > 1 for t in range(starts[r], starts[r + 1])}
    assert set(covered) == expected
    item_of, place = tiles_of_rows(jnp.asarray(starts), T, tile)
    for t, item in covered.items():
        assert item_of[t] == item and work[1][item] + place[t] == t


def test_decode_rows():
    work = decode_rows(jnp.array([7, 0, 3], jnp.int32), jnp.array([True, False, True]))
    np.testing.assert_array_equal(work.tokens, [1, 0, 1])
    np.testing.assert_array_equal(work.position, [6, -1, 2])


@pytest.mark.parametrize("window", [None, 1, 10, 1000])
@pytest.mark.parametrize("splits", [1, 3])
def test_bounds_hold_exactly_the_visible_keys(window, splits):
    keys = 8
    for position, tokens in [(0, 1), (7, 1), (8, 1), (30, 5), (31, 9), (63, 2)]:
        visible = {
            p: set(range(0 if window is None else max(0, p - window + 1), p + 1))
            for p in range(position, position + tokens)
        }
        union = set.union(*visible.values())
        walked, whole = [], []
        for split in range(splits):
            b = tile_bounds(
                jnp.int32(position), jnp.int32(tokens), jnp.int32(split),
                keys=keys, splits=splits, window=window,
            )  # fmt: skip
            assert (int(b.lowest), int(b.end)) == (min(union), max(union) + 1)
            walked += range(int(b.first), int(b.last))
            whole += range(int(b.whole_from), int(b.whole_to))
            assert b.first <= b.whole_from <= b.whole_to or b.first >= b.last
        assert walked == sorted({key // keys for key in union})
        for tile in whole:
            assert all(set(range(tile * keys, (tile + 1) * keys)) <= v for v in visible.values())
