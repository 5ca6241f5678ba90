import dataclasses
import json
import logging
from pathlib import Path

import pytest

from jaxllm.errors import ConfigError
from jaxllm.planning import kv_bytes_per_token
from jaxllm.planning.gpus import GPUS, find_gpu
from jaxllm.planning.models_table import MODELS
from jaxllm.planning.plan import plan
from jaxllm.planning.render import render_json, render_table

FOLDERS = Path(__file__).parent.parent / "golden" / "data"
GIB = 2**30
FIXED = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "compile_step": False}


def planned(model="llama-3.1-8b", **settings):
    return plan(model, **(FIXED | settings))


def test_llama_8b_on_an_h100():
    found = planned(gpu="H100", max_model_len=16384)
    assert found.kv_bytes_per_token == 131072
    assert found.weight_bytes == 2 * 8_030_261_248
    assert found.fits and found.smallest_tp == 1
    left = int(found.memory_bytes * found.knob("gpu_memory_utilization").value)
    left -= found.weight_bytes + found.activation_bytes + found.reserve_bytes
    assert found.pool_bytes == left
    assert found.num_tokens == (found.num_blocks - 1) * found.block_size
    assert left - 64 * 16 * 131072 < found.num_tokens * 131072 < left
    assert found.full_length_requests == found.num_tokens / 16384


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-32b", "smollm2-135m"])
def test_more_memory_never_plans_less(model):
    sizes = [planned(model, memory=gib * GIB) for gib in range(8, 200, 8)]
    for field in ("num_tokens", "largest_context", "fits"):
        values = [getattr(found, field) for found in sizes]
        assert values == sorted(values), field
    smallest = [found.smallest_tp or 1000 for found in sizes]
    assert smallest == sorted(smallest, reverse=True)
    assert sizes[-1].num_tokens > sizes[0].num_tokens


def test_advice_never_shrinks_with_memory():
    advice = [
        plan("llama-3.1-8b", memory=gib * GIB, compile_step=False).knob("max_num_seqs").value
        for gib in range(20, 70, 4)
    ]
    assert advice == sorted(advice) and advice[0] < advice[-1]


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tensor_parallelism_halves_kv_and_weights(tp):
    one, many = planned(memory=80 * GIB), planned(memory=80 * GIB, tensor_parallel_size=tp)
    assert many.kv_bytes_per_token * tp == one.kv_bytes_per_token
    assert one.weight_bytes / tp <= many.weight_bytes < 1.01 * one.weight_bytes / tp
    assert many.num_tokens > tp * one.num_tokens


def test_narrower_numbers_hold_more():
    base = planned(memory=40 * GIB)
    assert planned(memory=40 * GIB, quantization="int8").num_tokens > base.num_tokens
    narrow = planned(memory=40 * GIB, kv_cache_dtype="fp8_e4m3")
    assert narrow.kv_bytes_per_token * 2 == base.kv_bytes_per_token
    assert narrow.num_tokens >= 2 * base.num_tokens


def test_log_probabilities_of_the_whole_vocabulary_take_memory_where_they_are_allowed():
    base = planned(gpu="H100", max_logprobs=1000)
    results = 4 * FIXED["max_num_seqs"] * 128256
    for limit in (-1, 128256):
        found = planned(gpu="H100", max_logprobs=limit)
        assert found.activation_bytes == base.activation_bytes + results
        assert found.num_tokens < base.num_tokens
    with pytest.raises(ConfigError, match="max_logprobs=0"):
        planned(gpu="H100", max_logprobs=0)


def test_what_does_not_fit_says_on_how_many_it_would():
    found = planned("llama-3.1-70b", gpu="H100", max_model_len=8192)
    assert not found.fits and found.num_tokens == 0 and found.smallest_tp == 2
    assert planned("llama-3.1-70b", gpu="H100", max_model_len=8192, tensor_parallel_size=2).fits
    assert "DOES NOT FIT" in render_table(found)


def test_smallest_tp_is_the_first_that_fits():
    found = planned("qwen2.5-72b", gpu="A100-80")
    fits = {
        tp: planned("qwen2.5-72b", gpu="A100-80", tensor_parallel_size=tp, max_model_len=32768).fits
        for tp in (1, 2, 4)
    }
    assert found.smallest_tp == min(tp for tp, ok in fits.items() if ok)


def test_a_limit_that_does_not_fit_is_lowered():
    found = planned(gpu="L4")
    assert found.fits and found.max_model_len == found.largest_context == found.num_tokens < 131072
    assert "does not fit" in found.knob("max_model_len").reason


def test_every_knob_has_a_value_and_a_reason():
    found = plan("llama-3.1-8b", gpu="H100", compile_step=False)
    names = ["max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization"]
    assert [knob.name for knob in found.knobs] == names
    assert all(len(knob.reason) > 20 for knob in found.knobs)
    assert found.knob("max_num_batched_tokens").value >= found.knob("max_num_seqs").value


def test_a_tighter_target_advises_smaller_batches():
    loose = plan("llama-3.1-8b", gpu="H200", compile_step=False, target_itl=0.1)
    tight = plan("llama-3.1-8b", gpu="H200", compile_step=False, target_itl=0.006)
    assert tight.knob("max_num_seqs").value < loose.knob("max_num_seqs").value
    assert "target 6 ms" in tight.knob("max_num_seqs").reason
    short = plan("llama-3.1-8b", gpu="H200", compile_step=False, max_step_time=0.05)
    assert short.knob("max_num_batched_tokens").value < 8192


def test_roofline_of_one_request_is_reading_the_weights():
    found = planned(gpu="H100")
    point = found.decode[0]
    assert (point.batch, point.context, point.bound) == (1, 1024, "memory")
    read = found.weight_bytes - 2 * 128256 * 4096 + 1025 * 131072
    assert point.seconds == pytest.approx(read / 3.35e12, rel=1e-6)
    rates = [p.tokens_per_second for p in found.decode if p.context == 1024]
    assert rates == sorted(rates)
    # 2 FLOP per parameter at 989 TFLOP/s bound prefill; attention takes some of it.
    assert 0.8 < found.prefill[-1].tokens_per_second / (989e12 / 2 / 7e9) < 1.0


@pytest.mark.parametrize("gpu", GPUS)
def test_every_gpu_plans_a_small_model(gpu):
    found = planned("smollm2-1.7b", gpu=gpu)
    assert found.fits and found.decode and found.prefill
    assert GPUS[gpu].source in " ".join(found.notes)


def test_gpu_names_are_found_however_they_are_written():
    assert find_gpu("nvidia a100 80gb").name == "A100-80"
    assert find_gpu("rtx 4090").name == "RTX-4090"
    with pytest.raises(ConfigError, match="H100"):
        find_gpu("V100")


def test_json_carries_everything():
    found = planned(gpu="A10")
    content = json.loads(render_json(found))
    assert content["num_tokens"] == found.num_tokens
    assert content["knobs"][0]["reason"] == found.knobs[0].reason
    assert set(content) == {field.name for field in dataclasses.fields(found)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "GPU"),
        ({"gpu": "H100", "memory": GIB}, "one of the two"),
        ({"gpu": "H100", "max_model_len": 10**6}, "131072"),
        ({"gpu": "H100", "tensor_parallel_size": 3}, "tensor_parallel_size=3"),
        ({"gpu": "H100", "max_num_seqs": 9000}, "below max_num_seqs"),
        ({"gpu": "H100", "quantization": "int2"}, "int2"),
        ({"gpu": "H100", "gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5"),
        ({"gpu": "H100", "block_size": 0}, "block_size=0"),
        ({"gpu": "H100", "mean_context": 0}, "mean_context=0"),
        ({"gpu": "H100", "target_itl": -1.0}, "target_itl=-1.0"),
        ({"gpu": "H100", "kv_cache_dtype": "int4"}, "int4"),
    ],
)
def test_contradictions_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        planned(**settings)


def test_an_unknown_model_lists_the_known():
    with pytest.raises(ConfigError, match=r"llama-3\.1-8b"):
        planned("no-such-model", gpu="H100")


def test_a_dict_and_a_folder_are_models_too():
    config = json.loads((FOLDERS / "qwen3" / "config.json").read_text())
    by_dict = planned(config, gpu="L4", max_model_len=64)
    by_folder = planned(str(FOLDERS / "qwen3"), gpu="L4", max_model_len=64)
    assert by_dict.num_tokens == by_folder.num_tokens > 0
    assert by_folder.kv_bytes_per_token == kv_bytes_per_token(
        config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"], 2
    )


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama3", {"kv_cache_memory": 3_000_000}),
        ("mistral", {"kv_cache_memory": 1_234_567, "block_size": 16}),
        ("qwen3", {"kv_cache_memory": 2_000_000, "kv_cache_dtype": "float32", "dtype": "float32"}),
    ],
)
def test_the_engine_has_the_capacity_that_was_planned(name, settings, caplog):
    from jaxllm import LLM

    folder = str(FOLDERS / name)
    predicted = plan(folder, gpu="cpu", **settings)
    with caplog.at_level(logging.INFO, logger="jaxllm.sizing"):
        llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            progress=False,
            **settings,
        )
    engine = llm._engine
    assert predicted.num_blocks == engine.num_blocks
    assert f"{predicted.num_tokens} tokens" in caplog.text
    pool = engine.core.scheduler.pool
    taken = pool.take(pool.num_free)
    assert len(taken) * engine.scheduler_config.block_size == predicted.num_tokens
    pool.release(taken)
    assert predicted.max_model_len == engine.scheduler_config.max_model_len


def test_models_of_the_table_are_all_plannable():
    for name in MODELS:
        assert planned(name, memory=800 * GIB).fits, name
