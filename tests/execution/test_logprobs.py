import jax
import numpy as np

from jaxllm.execution.logprobs import all_logprobs, processed_logits, token_logprobs

RNG = np.random.default_rng(0)


def reference(logits):
    x = logits.astype(np.float64)
    return (
        x
        - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - x.max(-1, keepdims=True)
    )


def test_values_ranks_and_the_most_probable():
    logits = RNG.normal(size=(5, 1000)).astype(np.float32) * 5
    tokens = np.array([logits[0].argmax(), 3, 999, 0, 500], np.int32)
    values, ranks, top, ids = jax.jit(token_logprobs, static_argnums=0)(20, logits, tokens)
    expected = reference(logits)
    np.testing.assert_allclose(values, expected[np.arange(5), tokens], atol=2e-5)
    order = np.argsort(-logits, axis=-1, kind="stable")
    np.testing.assert_array_equal(ids, order[:, :20])
    np.testing.assert_allclose(top, np.take_along_axis(expected, order[:, :20], -1), atol=2e-5)
    assert [int(r) for r in ranks] == [
        int(np.flatnonzero(order[i] == t)[0]) + 1 for i, t in enumerate(tokens)
    ]
    assert ranks[0] == 1 and float(values[0]) == float(top[0, 0])


def test_the_whole_vocabulary():
    logits = RNG.normal(size=(2, 300)).astype(np.float32)
    np.testing.assert_allclose(all_logprobs(logits), reference(logits), atol=2e-5)


def test_impossible_tokens_are_finite():
    logits = np.full((1, 40), -np.inf, np.float32)
    logits[0, 7] = 1.0
    values, _, top, _ = token_logprobs(5, logits, np.array([3], np.int32))
    assert float(values[0]) == -9999.0
    assert np.isfinite(np.asarray(top)).all() and float(top[0, 0]) == 0.0


def test_processed_logits_are_those_sampled_from():
    logits = RNG.normal(size=(2, 50)).astype(np.float32)
    temperature = np.array([0.5, 0.0], np.float32)
    floor = np.array([1.0, -np.inf], np.float32)
    out = np.asarray(processed_logits(logits, temperature, floor))
    np.testing.assert_allclose(out[1], logits[1])
    scaled = logits[0] / 0.5
    np.testing.assert_allclose(out[0], np.where(scaled >= 1.0, scaled, -np.inf))
