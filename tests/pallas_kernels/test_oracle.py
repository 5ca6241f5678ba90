"""The oracle against attention written out densely for cases small enough to see through."""

import numpy as np

from pallas_kernels.paged_attention import oracle


def one_request(context: int, queries: int, **options):
    rng = np.random.default_rng(3)
    k = rng.standard_normal((context, 1, 8))
    v = rng.standard_normal((context, 1, 8))
    q = rng.standard_normal((queries, 1, 8))
    pools = np.zeros((2, 4, 1, 4, 8))
    for p in range(context):
        pools[:, [3, 1][p // 4], :, p % 4] = k[p], v[p]
    table, starts = np.array([[3, 1]]), np.array([0, queries])
    out, lse = oracle.paged_attention(
        q, pools[0], pools[1], table, np.array([context]), starts, scale=0.5, **options
    )
    return q[:, 0], k[:, 0], v[:, 0], out[:, 0], lse[:, 0]


def softmax(z):
    w = np.exp(z - z.max(-1, keepdims=True))
    return w / w.sum(-1, keepdims=True)


def test_last_token_sees_the_whole_context():
    q, k, v, out, lse = one_request(6, 1)
    z = q @ k.T * 0.5
    np.testing.assert_allclose(out, softmax(z) @ v)
    np.testing.assert_allclose(lse, np.log(np.exp(z).sum(-1)))


def test_chunk_is_causal():
    q, k, v, out, _ = one_request(6, 3)
    z = np.where(np.arange(6) <= np.array([[3], [4], [5]]), q @ k.T * 0.5, -np.inf)
    np.testing.assert_allclose(out, softmax(z) @ v)


def test_window_of_one_returns_the_value_of_the_token_itself():
    _, _, v, out, _ = one_request(7, 2, window=1)
    np.testing.assert_allclose(out, v[5:7])


def test_sink_takes_its_share_of_the_softmax():
    q, k, v, out, lse = one_request(5, 1, sinks=np.array([0.7]))
    z = np.concatenate([(q @ k.T)[0] * 0.5, [0.7]])
    np.testing.assert_allclose(out[0], softmax(z)[:-1] @ v)
    np.testing.assert_allclose(lse[0], np.log(np.exp(z).sum()))


def test_soft_cap_and_scales():
    q, k, v, out, _ = one_request(5, 1, soft_cap=1.5, k_scale=2.0, v_scale=3.0)
    z = 1.5 * np.tanh(q @ (2 * k).T * 0.5 / 1.5)
    np.testing.assert_allclose(out, softmax(z) @ (3 * v))


def test_write_skips_the_null_block():
    pool = np.zeros((3, 1, 2, 4))
    rows = np.ones((2, 1, 4))
    written = oracle.write_kv(rows, pool, np.array([1, 5]), 2)
    assert written[0].sum() == 0
    np.testing.assert_array_equal(written[2, 0, 1], 1)
