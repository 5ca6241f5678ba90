import numpy as np

from jaxllm.execution.noise import uniform


def draw(seed: int, position: int) -> float:
    return float(uniform(np.array([seed % 2**64], np.uint64), np.array([position]))[0])


def test_a_number_depends_on_seed_and_position_alone():
    seeds = np.array([1, 2, 1, 7], np.uint64)
    positions = np.array([5, 5, 6, 5])
    together = uniform(seeds, positions)
    assert together.tolist() == [draw(s, p) for s, p in zip(seeds.tolist(), positions, strict=True)]
    assert len(set(together.tolist())) == 4


def test_numbers_are_uniform_over_positions_and_over_seeds():
    n = 200_000
    for numbers in (
        uniform(np.full(n, 3, np.uint64), np.arange(n)),
        uniform(np.arange(n, dtype=np.uint64), np.full(n, 17)),
    ):
        assert numbers.dtype == np.float32 and numbers.min() >= 0 and numbers.max() < 1
        counts, _ = np.histogram(numbers, bins=64, range=(0, 1))
        # Chi-square with 63 degrees of freedom: mean 63, standard deviation 11.2.
        chi2 = float(((counts - n / 64) ** 2 / (n / 64)).sum())
        assert 63 - 5 * 11.2 < chi2 < 63 + 5 * 11.2


def test_neighbouring_seeds_share_no_shifted_stream():
    streams = [uniform(np.full(500, s, np.uint64), np.arange(500)) for s in range(4)]
    for i, a in enumerate(streams):
        for b in streams[i + 1 :]:
            # 24 bits collide by chance now and then, but not in runs.
            assert len(set(a.tolist()) & set(b.tolist())) < 5


def test_extreme_seeds_work():
    assert len({draw(s, 0) for s in (0, 1, -1, 2**63 - 1, -(2**63))}) == 5
