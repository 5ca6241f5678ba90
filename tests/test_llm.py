"""LLM on the recorded tiny models: greedy outputs, batching, sharding, and what compiles."""

from pathlib import Path

import jax
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.errors import CapacityError, ConfigError, ParameterError
from jaxllm.execution.compilation import compile_counts
from jaxllm.text.errors import PromptError
from tests.models.families import DATA

SMALL = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 96,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "block_size": 8,
    "kv_cache_memory": "4MiB",
    "progress": False,
}
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


def start(name: str, **settings) -> LLM:
    return LLM(str(DATA / name), **{**SMALL, **settings})


def recorded(name: str) -> tuple[list[dict], list[list[int]]]:
    data = np.load(DATA / name / "recording.npz")
    prompts = [{"prompt_token_ids": data[f"prompt_{i}"].tolist()} for i in (0, 1)]
    return prompts, [data[f"greedy_{i}"].tolist() for i in (0, 1)]


def tokens(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def llm():
    return start("qwen3", max_num_seqs=4)


@pytest.mark.parametrize("name", ["llama31", "mistral", "qwen2", "qwen3"])
def test_greedy_outputs_are_those_of_transformers(name):
    prompts, expected = recorded(name)
    assert tokens(start(name, enforce_eager=True).generate(prompts, GREEDY, use_tqdm=False)) == (
        expected
    )


@pytest.mark.parametrize(
    ("name", "devices"),
    [("llama2", 2), ("llama2", 4), ("llama3", 2), ("llama3", 4)],
)
def test_sharding_does_not_change_the_tokens(name, devices):
    # llama3 has two KV heads: on four devices each is there twice.
    prompts, expected = recorded(name)
    sharded = start(name, enforce_eager=True, tensor_parallel_size=devices)
    assert tokens(sharded.generate(prompts, GREEDY, use_tqdm=False)) == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"async_scheduling": True},
        {"enable_prefix_caching": False},
        {"num_blocks": 14},
        {"attention_backend": "xla", "enforce_eager": True},
        {"kv_cache_dtype": "float32", "block_size": 16},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 96},
    ],
    ids=str,
)
def test_settings_do_not_change_the_tokens(settings):
    prompts, expected = recorded("qwen3")
    engine = start("qwen3", **settings)
    for _ in range(2):
        assert tokens(engine.generate(prompts, GREEDY, use_tqdm=False)) == expected


def test_nothing_compiles_after_the_warm_up(llm):
    prompts, _ = recorded("qwen3")
    counts = compile_counts()
    before = counts.requested
    params = [
        SamplingParams(temperature=t, top_p=p, max_tokens=m, ignore_eos=True)
        for t, p, m in [(0, 1, 3), (1, 1, 9), (0.7, 0.5, 5), (0, 1, 20), (1, 0.9, 2), (0, 1, 1)]
    ]
    llm.generate([prompts[i % 2] for i in range(6)], params, use_tqdm=False)
    assert counts.requested == before


def test_a_second_start_finds_every_program_in_the_cache(tmp_path):
    counts = compile_counts()
    start("smollm2", compilation_cache_dir=str(tmp_path))
    jax.clear_caches()
    before, hits = counts.requested, counts.cache_hits
    start("smollm2", compilation_cache_dir=str(tmp_path))
    assert counts.requested > before
    assert counts.requested - before == counts.cache_hits - hits


def test_eager_compiles_only_what_a_step_needs():
    counts = compile_counts()
    engine = start("qwen25", enforce_eager=True)
    assert engine._engine.runner.programs.items() == []
    prompts, expected = recorded("qwen25")
    assert tokens(engine.generate(prompts[:1], GREEDY, use_tqdm=False)) == expected[:1]
    programs = engine._engine.runner.programs
    assert 0 < len(programs.items()) < len(programs.keys())
    assert counts.requested > 0


def test_no_program_copies_the_pool(llm):
    runner = llm._engine.runner
    pool = sum(array.nbytes for array in (*runner._k_pools, *runner._v_pools))
    for key, program in runner.programs.items():
        if key.kind == "forward":
            analysis = program.memory_analysis()
            assert analysis.alias_size_in_bytes >= pool
            assert analysis.temp_size_in_bytes < runner._k_pools[0].nbytes


def test_results_come_in_the_order_of_the_prompts(llm):
    many = [{"prompt_token_ids": [i % 100 + 1, 2, 3]} for i in range(50)]
    lengths = [1 + (i * 7) % 11 for i in range(50)]
    outputs = llm.generate(
        many,
        [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths],
        use_tqdm=False,
    )
    assert [o.prompt_token_ids for o in outputs] == [p["prompt_token_ids"] for p in many]
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)


def test_a_seed_gives_the_same_tokens_in_any_company(llm):
    prompts, _ = recorded("qwen3")
    seeded = SamplingParams(temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)
    other = SamplingParams(temperature=0.9, top_p=0.8, max_tokens=17, ignore_eos=True)
    alone = tokens(llm.generate(prompts[0], seeded, use_tqdm=False))[0]
    crowd = llm.generate(
        [prompts[1], prompts[0], prompts[1], prompts[0], prompts[1]],
        [other, seeded, other, seeded, other],
        use_tqdm=False,
    )
    assert tokens(crowd)[1] == alone and tokens(crowd)[3] == alone
    different = SamplingParams(temperature=1.0, seed=12, max_tokens=12, ignore_eos=True)
    assert tokens(llm.generate(prompts[0], different, use_tqdm=False))[0] != alone


def test_n_samples_use_the_seeds_after_the_first(llm):
    prompts, _ = recorded("qwen3")
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
    group = llm.generate(prompts[0], params, use_tqdm=False)[0].outputs
    assert [sample.index for sample in group] == [0, 1, 2]
    for i, sample in enumerate(group):
        one = SamplingParams(temperature=1.0, seed=5 + i, max_tokens=8, ignore_eos=True)
        assert tokens(llm.generate(prompts[0], one, use_tqdm=False))[0] == sample.token_ids


def test_an_engine_seed_repeats_unseeded_requests():
    prompts, _ = recorded("qwen3")
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    runs = [
        tokens(start("qwen3", enforce_eager=True, seed=s).generate(prompts, params, use_tqdm=False))
        for s in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_stop_ids_and_eos_end_the_output(llm):
    prompts, expected = recorded("qwen3")
    stop = expected[0][4]
    output = llm.generate(
        prompts[0],
        SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, stop_token_ids=[stop]),
        use_tqdm=False,
    )[0].outputs[0]
    assert output.token_ids == expected[0][: expected[0].index(stop) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_prefixes_are_reused_and_counted(llm):
    prompts, expected = recorded("qwen3")
    llm.reset_prefix_cache()
    first, second = (llm.generate(prompts[1], GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 16)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids == expected[1]
    salted = {**prompts[1], "cache_salt": "x"}
    assert llm.generate(salted, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    assert llm.reset_prefix_cache()
    assert llm.generate(prompts[1], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_priorities_are_one_or_one_each():
    prompts, expected = recorded("qwen3")
    engine = start("qwen3", scheduling_policy="priority", enforce_eager=True)
    outputs = engine.generate(prompts, GREEDY, priority=[1, 0], use_tqdm=False)
    assert tokens(outputs) == expected
    with pytest.raises(ParameterError, match="priority='3 items'"):
        engine.generate(prompts, GREEDY, priority=[1, 0, 2], use_tqdm=False)


def test_a_bad_request_stops_nothing_and_nobody(llm):
    prompts, expected = recorded("qwen3")
    bad = [
        ([{"prompt_token_ids": []}], PromptError, "empty"),
        ([{"prompt_token_ids": [128]}], PromptError, "128 .* outside the vocabulary"),
        ([{"prompt_token_ids": [-1]}], PromptError, "-1"),
        ([[1] * 96], PromptError, "96 tokens, but at most 95"),
        (["text"], PromptError, "no tokenizer"),
    ]
    for prompt, error, message in bad:
        with pytest.raises(error, match=message):
            llm.generate([prompts[0], *prompt], GREEDY, use_tqdm=False)
    with pytest.raises(ParameterError, match="stop_token_ids=500"):
        llm.generate(prompts, SamplingParams(stop_token_ids=[500]), use_tqdm=False)
    with pytest.raises(ParameterError, match="sampling_params='3 items'"):
        llm.generate(prompts, [GREEDY] * 3, use_tqdm=False)
    assert tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected


def test_a_request_that_can_never_fit_is_refused_and_the_next_call_works():
    engine = start("qwen3", num_blocks=14, max_model_len=96, enforce_eager=True)
    engine._engine.core.num_blocks = 5
    engine._engine.core.reset()
    prompts, expected = recorded("qwen3")
    with pytest.raises(CapacityError, match=r"needs 5 KV blocks of 8 tokens .* pool holds 4"):
        engine.generate(prompts, GREEDY, use_tqdm=False)
    short = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    assert tokens(engine.generate(prompts, short, use_tqdm=False)) == [e[:10] for e in expected]


def test_an_interrupt_leaves_no_stuck_state(llm, monkeypatch):
    prompts, expected = recorded("qwen3")
    runner = llm._engine.runner
    dispatch, calls = runner.dispatch, []

    def interrupted(plan):
        step = dispatch(plan)
        calls.append(plan)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return step

    monkeypatch.setattr(runner, "dispatch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    monkeypatch.undo()
    assert not llm._engine.core.has_unfinished
    assert tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected


def test_a_failed_program_call_that_consumed_the_pools_is_survived(llm, monkeypatch):
    prompts, expected = recorded("qwen3")
    runner = llm._engine.runner

    def lost(plan):
        for array in runner._k_pools:
            array.delete()
        raise RuntimeError("device lost")

    monkeypatch.setattr(runner, "dispatch", lost)
    with pytest.raises(RuntimeError, match="device lost"):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    monkeypatch.undo()
    assert tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 300}, "max_model_len=300 is above .*=256"),
        ({"kv_cache_memory": 20000, "max_model_len": 96}, r"set --max-model-len to at most \d+"),
        ({"max_num_batched_tokens": 1}, "max_num_batched_tokens=1 is below max_num_seqs=2"),
        ({"tensor_parallel_size": 3}, "does not divide the 4 attention heads"),
        ({"dtype": "int4"}, "dtype='int4': one of auto, float32, bfloat16, float16"),
        ({"blocksize": 3}, "unknown setting 'blocksize'"),
        ({"attention_backend": "fast"}, "impl 'fast' is not one of"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_say_why(settings, message):
    with pytest.raises(ValueError, match=message):
        start("qwen3", **{"enforce_eager": True, **settings})


def test_an_unset_length_shrinks_to_the_pool(caplog):
    engine = start("qwen3", max_model_len=None, kv_cache_memory=60000, enforce_eager=True)
    assert engine._engine.scheduler_config.max_model_len < 256
    assert "max_model_len lowered from 256 to" in caplog.text


def test_random_weights_need_only_a_config(tmp_path: Path):
    (tmp_path / "config.json").write_text((DATA / "llama2" / "config.json").read_text())
    engine = LLM(str(tmp_path), **{**SMALL, "load_format": "dummy", "enforce_eager": True})
    outputs = engine.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    assert len(outputs[0].outputs[0].token_ids) == 32


def test_importing_the_package_is_light():
    import subprocess
    import sys

    code = "import sys, jaxllm; sys.exit('jax' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_unknown_settings_are_refused_before_anything_loads():
    with pytest.raises(ConfigError, match="unknown setting 'tp'"):
        LLM("nowhere", tp=2)
