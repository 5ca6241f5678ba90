"""--batch-invariant: the same bits alone, in company, cut, preempted and from the cache."""

import struct

import jax
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams, StructuredOutputs
from jaxllm.errors import ConfigError
from jaxllm.execution.invariance import check_batch_invariance
from pallas_kernels import cpu_library
from tests.models.families import DATA

RNG = np.random.default_rng(5)
SHARED = RNG.integers(3, 288, 24).tolist()


def prompt(length: int, shared: bool = False) -> dict:
    tail = RNG.integers(3, 288, length).tolist()
    return {"prompt_token_ids": SHARED + tail if shared else tail}


REQUESTS = [
    (prompt(31), {"temperature": 0, "logprobs": 4, "prompt_logprobs": 2}),
    (prompt(5, shared=True), {"temperature": 1.0, "seed": 1, "logprobs": 0}),
    (prompt(9, shared=True), {"temperature": 0.8, "seed": 2, "top_p": 0.9, "logprobs": 3}),
    (prompt(1), {"temperature": 1.3, "seed": 3, "top_k": 30, "logprobs": 1, "max_tokens": 30}),
    (prompt(50), {"temperature": 1.0, "seed": 4, "min_p": 0.02, "logprobs": -1, "max_tokens": 6}),
    (prompt(17), {"temperature": 1.0, "seed": 5, "n": 3, "logprobs": 2}),
    (prompt(12), {"temperature": 1.0, "seed": 6, "frequency_penalty": 1.0, "logprobs": 0}),
    (prompt(8, shared=True), {"temperature": 0, "repetition_penalty": 1.3, "logit_bias": {9: 2.0}}),
    (prompt(70), {"temperature": 1.0, "seed": 8, "logprobs": 2, "min_tokens": 5}),
    (prompt(20), {"temperature": 1.0, "seed": 9,
                  "structured_outputs": StructuredOutputs(regex="[a-z ]{4,8}")}),
]  # fmt: skip


def start(dtype: str, **settings) -> LLM:
    options = {
        "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 8,
        "num_blocks": 20, "enforce_eager": True, "progress": False, "batch_invariant": True,
        "max_logprobs": -1,
    }  # fmt: skip
    return LLM(str(DATA / "tiny_chat"), dtype=dtype, **{**options, **settings})


def params(options: dict) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 18, "ignore_eos": True, **options})


def bits(output) -> list:
    """Everything that must not change, floats as their bits."""

    def of(entries):
        return [
            None if entry is None
            else [(token, e.rank, struct.pack("d", e.logprob)) for token, e in entry.items()]
            for entry in entries or []
        ]  # fmt: skip

    completions = [(c.token_ids, c.text, of(c.logprobs)) for c in output.outputs]
    return [completions, of(output.prompt_logprobs)]


def together(llm: LLM, requests: list = REQUESTS) -> list:
    outputs = llm.generate(
        [p for p, _ in requests], [params(o) for _, o in requests], use_tqdm=False
    )
    return [bits(output) for output in outputs]


def one_by_one(llm: LLM, requests: list = REQUESTS) -> list:
    results = []
    for request, options in requests:
        llm.reset_prefix_cache()
        results.append(bits(llm.generate(request, params(options), use_tqdm=False)[0]))
    return results


needs_kernels = pytest.mark.skipif(
    cpu_library.unavailable() is not None, reason="the C++ kernels cannot be built here"
)


@needs_kernels
@pytest.mark.parametrize(("dtype", "budgets"), [("bfloat16", [20]), ("float32", [8])])
def test_company_cuts_preemption_and_cache_do_not_change_a_bit(dtype, budgets):
    llm = start(dtype)
    alone = one_by_one(llm)
    assert llm.get_metrics()["num_preemptions"] == 0
    llm.reset_prefix_cache()
    assert together(llm) == alone
    assert llm.get_metrics()["num_preemptions"] > 0
    hits = llm.get_metrics()["prefix_cache_hits"]
    assert together(llm) == alone
    assert llm.get_metrics()["prefix_cache_hits"] > hits
    for budget in budgets:
        assert together(start(dtype, max_num_batched_tokens=budget)) == alone


@needs_kernels
def test_other_programs_are_one_shape_each_or_refused(monkeypatch):
    """XLA's products: without the flag bits differ; with it they hold, or the start is refused."""
    monkeypatch.setenv("JAXLLM_CPU_KERNELS", "xla")
    some = REQUESTS[:3]
    free = start("float32", batch_invariant=False, num_blocks=100)
    assert together(free, some) != one_by_one(free, some)
    try:
        llm = start("float32", num_blocks=100)
    except ConfigError as error:
        assert "batch_invariant=True cannot be held here" in str(error)
        return
    keys = llm._engine.runner.programs.keys()
    sizes = {(key.kind, key.size) for key in keys}
    assert sizes == {
        ("forward", 64), ("rows", 64), ("logits", 4), ("sample", 4), ("logprobs", 4), ("mask", 4),
        ("edit", 4),
    }  # fmt: skip
    alone = one_by_one(llm, some)
    llm.reset_prefix_cache()
    assert together(llm, some) == alone


@needs_kernels
@pytest.mark.parametrize("settings", [{"max_num_seqs": 1}, {"num_blocks": 2, "max_model_len": 4}])
def test_the_smallest_engines_are_checked_too(settings):
    llm = start("float32", max_num_batched_tokens=4, **settings)
    output = llm.generate([5, 6], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 2


@needs_kernels
def test_a_program_that_breaks_the_promise_is_named():
    llm = start("float32", max_num_batched_tokens=32)
    runner = llm._engine.runner
    honest = runner.hidden_states

    def dishonest(plan, key):
        hidden = honest(plan, key)
        return np.nextafter(hidden, np.inf, dtype=hidden.dtype) if key.size == 2 else hidden

    runner.hidden_states = dishonest
    with pytest.raises(ConfigError, match=r"batch_invariant=True.*forward program of 2 "):
        check_batch_invariance(runner)
    del runner.hidden_states
    programs = runner.programs
    keys = programs.keys()
    key = next(k for k in keys if k.kind == "logprobs" and k.size == 1)
    compiled = programs[key]
    programs._compiled[key] = lambda *arguments: jax.tree.map(
        lambda x: x + (np.arange(len(x)) == 0).reshape(-1, *[1] * (x.ndim - 1)).astype(x.dtype),
        compiled(*arguments),
    )
    with pytest.raises(ConfigError, match=r"logprobs program of 1 "):
        check_batch_invariance(runner)
