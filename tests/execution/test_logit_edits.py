"""Edits of logits against a numpy oracle that follows the definitions one token at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.engine.request import Request
from jaxllm.execution.logit_edits import (
    RowEdits,
    apply_entries,
    apply_mask,
    entry_buckets,
    needs_edits,
    pack_edits,
    token_bits,
)
from jaxllm.sampling_params import SamplingParams

VOCAB = 100
MAX_LEN = 64
RNG = np.random.default_rng(0)


class Filler:
    """Fills masks row by row."""

    def fill_masks(self, states, rows, out):
        errors = {}
        for state, row in zip(states, rows, strict=True):
            if state.fails:
                errors[row] = ValueError("grammar too large")
            else:
                out[row] = token_bits(state.allowed, VOCAB)
        return errors


FILLER = Filler()


class Grammar:
    """Allows a fixed set; ends after a number of tokens."""

    def __init__(self, allowed, fails=False):
        self.allowed = allowed
        self.fails = fails
        self.is_terminated = False

    @property
    def filler(self):
        return FILLER

    def accept(self, token_id):
        return token_id in self.allowed


def request(prompt, output=(), eos=(), bad=(), grammar=None, **options) -> Request:
    params = SamplingParams(temperature=0, max_tokens=50, **options)
    made = Request(
        "r", list(prompt), params, max_model_len=MAX_LEN, eos_token_ids=frozenset(eos),
        bad_word_ids=tuple(bad), grammar=grammar,
    )  # fmt: skip
    made.token_ids += output
    return made


def oracle(logits: np.ndarray, r: Request) -> np.ndarray:
    out = logits.astype(np.float64).copy()
    p, output = r.params, r.token_ids[r.num_prompt_tokens :]
    allowed = np.ones(VOCAB, bool)
    if p.allowed_token_ids is not None:
        allowed &= np.isin(np.arange(VOCAB), p.allowed_token_ids)
    if r.grammar is not None:
        allowed &= np.isin(np.arange(VOCAB), r.grammar.allowed)
    ends = list(r.eos_token_ids | r.stop_ids)
    for token in range(VOCAB):
        out[token] += (p.logit_bias or {}).get(token, 0.0)
        count = output.count(token)
        if token in r.token_ids:
            out[token] = (
                out[token] / p.repetition_penalty
                if out[token] > 0
                else out[token] * p.repetition_penalty
            )
        out[token] -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
    for word in r.bad_word_ids:
        if tuple(output[len(output) - len(word) + 1 :]) == word[:-1] and len(output) >= (
            len(word) - 1
        ):
            out[word[-1]] = -np.inf
    if len(output) < p.min_tokens and (allowed.sum() > allowed[ends].sum()):
        out[ends] = -np.inf
    out[~allowed] = -np.inf
    return out


def edited(logits: np.ndarray, requests: list[Request | None]) -> np.ndarray:
    rows = [None if r is None else RowEdits(r, VOCAB) for r in requests]
    packed = pack_edits(rows, len(logits), MAX_LEN, VOCAB)
    out = jnp.asarray(logits)
    if packed.mask is not None:
        out = jax.jit(apply_mask)(out, packed.mask)
    if packed.entries is not None:
        out = jax.jit(apply_entries, static_argnums=0)(packed.num_entries, out, packed.entries)
    return np.asarray(out)


CASES = [
    request([1, 2, 3], [4, 4, 5], presence_penalty=1.5),
    request([1, 2, 3], [4, 4, 5], frequency_penalty=-0.7),
    request([1, 2, 3], [4, 4, 5], repetition_penalty=1.3),
    request([1, 2], [2, 9, 2], repetition_penalty=0.8, frequency_penalty=1.0, presence_penalty=-1),
    request([1], logit_bias={5: 3.5, 99: -100, 0: 100}),
    request([1], logit_bias={token: token / 50 for token in range(90)}),
    request([1], [7], allowed_token_ids=[7, 8, 31, 32, 63, 64, 99]),
    request([1], [7], min_tokens=3, eos=[2], stop_token_ids=[50]),
    request([1], [7, 8, 9], min_tokens=3, eos=[2], stop_token_ids=[50]),
    request([1], [7, 8], bad=[(7, 8, 9), (8, 10), (11,), (8, 8, 12), (1, 7, 8, 13)]),
    request([1], [], bad=[(5, 6), (6,)]),
    request([1], [3], grammar=Grammar([3, 4, 5]), allowed_token_ids=[4, 5, 6]),
    request([1], [3], grammar=Grammar([2]), min_tokens=4, eos=[2]),
    request(
        [1, 1], [4, 4, 6], repetition_penalty=1.9, logit_bias={4: -3.0, 2: 50.0}, min_tokens=9,
        eos=[2], bad=[(6, 4)], allowed_token_ids=list(range(10)),
    ),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(CASES)))
def test_each_edit_equals_the_oracle(index):
    logits = RNG.normal(size=(1, VOCAB)).astype(np.float32) * 4
    np.testing.assert_allclose(
        edited(logits, [CASES[index]])[0], oracle(logits[0], CASES[index]), rtol=1e-5, atol=1e-5
    )


def test_a_mixed_batch_gives_each_row_what_it_gets_alone():
    logits = RNG.normal(size=(16, VOCAB)).astype(np.float32) * 4
    together = edited(logits, [*CASES, None])
    for i, case in enumerate(CASES):
        np.testing.assert_array_equal(together[i], edited(logits[i : i + 1], [case])[0])
    np.testing.assert_array_equal(together[len(CASES) :], logits[len(CASES) :])


def test_counts_follow_the_output_as_it_grows():
    growing = request([1, 2], [], frequency_penalty=0.5, repetition_penalty=1.2)
    row = RowEdits(growing, VOCAB)
    logits = RNG.normal(size=(1, VOCAB)).astype(np.float32)
    for token in [5, 5, 1, 60, 5, 7]:
        growing.token_ids.append(token)
        packed = pack_edits([row], 1, MAX_LEN, VOCAB)
        out = apply_entries(packed.num_entries, jnp.asarray(logits), jnp.asarray(packed.entries))
        np.testing.assert_allclose(out[0], oracle(logits[0], growing), rtol=1e-5, atol=1e-5)


def test_a_row_without_any_allowed_token_fails_its_request_alone():
    stuck = request([1], grammar=Grammar([3]), allowed_token_ids=[4])
    fine = request([1], allowed_token_ids=[4])
    out = edited(np.zeros((2, VOCAB), np.float32), [stuck, fine])
    assert "no token is allowed" in stuck.failure and fine.failure is None
    assert np.isfinite(out[1]).sum() == 1


def test_a_grammar_that_gives_up_fails_its_request_alone():
    broken = request([1], grammar=Grammar([3], fails=True))
    edited(np.zeros((1, VOCAB), np.float32), [broken])
    assert broken.failure == "grammar too large"


def test_the_largest_bucket_holds_a_full_request():
    for rows in (1, 4, 64):
        buckets = entry_buckets(rows, 8192)
        assert buckets == sorted(buckets) and buckets[-1] >= rows * (8192 + 1024 + 256)


def test_plain_requests_need_no_edits():
    assert not needs_edits(request([1], [2], eos=[3], stop_token_ids=[4]))
    assert all(needs_edits(case) for case in CASES)
