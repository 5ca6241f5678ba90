"""int8 weights: `quantization="int8"`."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.errors import ConfigError
from jaxllm.models.layers import quantize_rows

MODEL = str(Path(__file__).parent / "golden/data/tiny_chat")
PROMPTS = ["The sea", "def f(x):", "One, two,"]
# On one CPU the C++ kernel rounds the rows of activations to int16, other paths do not.
ROUNDED_ROWS = 1e-3
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)


def _llm(**settings: object) -> LLM:
    return LLM(
        MODEL,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        num_blocks=40,
        enforce_eager=True,
        progress=False,
        **settings,
    )


def _answers(llm: LLM) -> tuple[list[list[int]], np.ndarray]:
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    values = [
        position[token].logprob
        for output in outputs
        for position, token in zip(output.logprobs or [], output.token_ids, strict=True)
    ]
    return [list(output.token_ids) for output in outputs], np.array(values)


@pytest.fixture(scope="module")
def quantized() -> LLM:
    return _llm(quantization="int8")


@pytest.fixture(scope="module")
def plain() -> LLM:
    return _llm()


def test_rows_are_rounded_to_half_a_step() -> None:
    weight = jax.random.normal(jax.random.key(0), (5, 64)).at[2].set(0.0)
    rounded, step = quantize_rows(weight)
    assert rounded.dtype == jnp.int8 and step.dtype == jnp.float32
    assert int(jnp.abs(rounded.astype(int)).max()) == 127
    np.testing.assert_array_equal(rounded[2], 0)
    error = jnp.abs(rounded * step[:, None] - weight)
    assert bool((error <= step[:, None] * 0.5001).all())


def test_matrices_are_int8_and_vectors_are_not(quantized: LLM, plain: LLM) -> None:
    for name, array in plain.params.items():
        kept = quantized.params[name]
        assert kept.shape == array.shape
        if array.ndim == 2:
            assert kept.dtype == jnp.int8
            assert quantized.params[f"{name}_scale"].shape == array.shape[:1]
        else:
            assert kept.dtype == array.dtype


def test_answers_are_those_of_the_rounded_weights(quantized: LLM, plain: LLM) -> None:
    tokens, logprobs = _answers(quantized)
    original = dict(plain.params)
    params = quantized.params
    widened = {
        name: params[name] * params[f"{name}_scale"][:, None] if f"{name}_scale" in params else leaf
        for name, leaf in original.items()
    }
    try:
        plain.update_weights(widened)
        expected_tokens, expected = _answers(plain)
    finally:
        plain.update_weights(original)
    assert tokens == expected_tokens
    np.testing.assert_allclose(logprobs, expected, atol=ROUNDED_ROWS)
    assert np.abs(logprobs - _answers(plain)[1]).max() > 5 * ROUNDED_ROWS


def test_new_weights_are_rounded_too(quantized: LLM, plain: LLM) -> None:
    before = _answers(quantized)
    original = dict(plain.params)
    quantized.update_weights({name: leaf * 0.5 for name, leaf in original.items()})
    assert quantized.params["model.embed_tokens.weight"].dtype == jnp.int8
    assert not np.array_equal(_answers(quantized)[1], before[1])
    quantized.update_weights(original)
    after = _answers(quantized)
    assert after[0] == before[0]
    np.testing.assert_array_equal(after[1], before[1])


def test_sleep_brings_the_rounded_weights_back(quantized: LLM) -> None:
    before = _answers(quantized)
    quantized.sleep(1)
    quantized.wake_up()
    np.testing.assert_array_equal(_answers(quantized)[1], before[1])


def test_tensor_parallel_gives_the_same_tokens(quantized: LLM) -> None:
    sharded = _llm(quantization="int8", tensor_parallel_size=2)
    tokens, logprobs = _answers(sharded)
    expected_tokens, expected = _answers(quantized)
    assert tokens == expected_tokens
    np.testing.assert_allclose(logprobs, expected, atol=ROUNDED_ROWS)


def test_training_on_rounded_weights_is_refused(quantized: LLM) -> None:
    with pytest.raises(ConfigError, match="int8"):
        _ = quantized.model


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="awq"):
        _llm(quantization="awq")
