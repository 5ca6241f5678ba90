"""New weights in a running engine, sleep, and the trainer's view of the same network."""

import gc
import json
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jaxllm import SamplingParams
from jaxllm.checkpoints.errors import CheckpointError, TensorMismatchError
from jaxllm.errors import AsleepError, BusyError, ParameterError, WeightsError
from jaxllm.execution import huge_pages
from jaxllm.execution.compilation import compile_counts
from tests.models.families import DATA, load
from tests.test_llm import GREEDY, start, tokens

NORM = "model.norm.weight"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
# Three blocks of 8 tokens.
PROMPT = {"prompt_token_ids": list(range(1, 25))}


@pytest.fixture(scope="module")
def llm():
    return start("qwen3", max_num_seqs=4, enforce_eager=True)


@pytest.fixture(scope="module")
def original(llm):
    return jax.tree.map(jnp.copy, llm.params)


@pytest.fixture(scope="module")
def changed(original):
    rng = np.random.default_rng(3)
    return {
        name: jnp.asarray(array + 0.3 * rng.standard_normal(array.shape, np.float32))
        for name, array in original.items()
    }


@pytest.fixture(autouse=True)
def restore(llm, original):
    yield
    llm.update_weights(original, running="abort")
    llm.wake_up()


def greedy(llm):
    return tokens(llm.generate([PROMPT], GREEDY, use_tqdm=False))[0]


def live_bytes():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_params_are_the_arrays_of_the_engine_under_the_names_of_the_checkpoint(llm):
    params = llm.params
    assert params[Q_PROJ].ndim == 2 and NORM in params
    assert params[Q_PROJ] is llm._engine.runner.params[Q_PROJ]
    params.clear()
    assert llm.params


def test_new_weights_change_the_output_and_old_ones_bring_it_back(llm, original, changed):
    before = greedy(llm)
    llm.update_weights(changed)
    assert greedy(llm) != before
    llm.update_weights(original)
    assert greedy(llm) == before


def test_an_update_equals_a_start_with_those_weights(llm, changed, tmp_path):
    (tmp_path / "config.json").write_text((DATA / "qwen3" / "config.json").read_text())
    save_file({k: np.asarray(v) for k, v in changed.items()}, tmp_path / "model.safetensors")
    llm.update_weights(changed)
    assert greedy(start(str(tmp_path), max_num_seqs=4, enforce_eager=True)) == greedy(llm)


def test_an_update_compiles_nothing_and_drops_the_prefix_cache(llm, changed):
    greedy(llm)
    assert llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].num_cached_tokens == 16
    before = compile_counts().requested
    llm.update_weights(changed)
    output = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0]
    assert compile_counts().requested == before
    assert output.num_cached_tokens == 0


def test_a_flax_module_its_state_and_nested_mappings_are_taken(llm, changed):
    llm.update_weights(changed)
    expected = greedy(llm)
    module = llm.model.module(changed)
    nested = {}
    for name, array in changed.items():
        *path, last = name.split(".")
        node = nested
        for part in path:
            node = node.setdefault(part, {})
        node[last] = np.asarray(array)
    for weights in (module, nnx.state(module), nnx.state(module, nnx.Param), nested):
        llm.update_weights({name: jnp.zeros_like(array) for name, array in changed.items()})
        llm.update_weights(weights)
        assert greedy(llm) == expected


@pytest.fixture(params=["alone", "in_an_arena"])
def memory(request, monkeypatch):
    """Where copies lie; a tiny model fills no huge page, so one byte has to do for the second."""
    if request.param == "in_an_arena":
        monkeypatch.setattr(huge_pages, "_HUGE_PAGE", 1)


@pytest.mark.usefixtures("memory")
def test_the_trainer_may_donate_or_overwrite_what_it_gave(llm, changed):
    llm.update_weights(changed)
    expected = greedy(llm)
    arrays = jax.tree.map(jnp.copy, changed)
    llm.update_weights(arrays)
    for array in arrays.values():
        array.delete()
    assert greedy(llm) == expected
    on_host = {name: np.array(array) for name, array in changed.items()}
    llm.update_weights(on_host)
    for name, array in on_host.items():
        np.testing.assert_array_equal(array, changed[name])
        array[...] = 0
    assert greedy(llm) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked for on Linux")
def test_weights_that_go_to_an_arena_are_copied_once(llm, changed, monkeypatch):
    def where(params):
        return {name: array.unsafe_buffer_pointer() for name, array in params.items()}

    filled = []

    def fill(self, params):
        filled.append(where(params))
        return original_fill(self, params)

    original_fill = huge_pages.Arena.fill
    monkeypatch.setattr(huge_pages.Arena, "fill", fill)
    monkeypatch.setattr(huge_pages, "_HUGE_PAGE", 1)
    before = {name: np.array(array) for name, array in changed.items()}
    llm.update_weights(changed)
    # The trainer's own arrays came to be copied, and the engine has none of them.
    assert filled == [where(changed)]
    assert not set(where(llm.params).values()) & set(where(changed).values())
    for name, array in changed.items():
        np.testing.assert_array_equal(array, before[name])


def test_without_a_copy_the_arrays_are_shared(llm, changed):
    def where(params):
        return {name: array.unsafe_buffer_pointer() for name, array in params.items()}

    llm.update_weights(changed, copy=False)
    assert where(llm.params) == where(changed)
    llm.update_weights(changed)
    assert not set(where(llm.params).values()) & set(where(changed).values())


def test_other_floats_are_cast_and_the_second_time_nothing_compiles(llm, changed):
    narrow = {name: array.astype(jnp.bfloat16) for name, array in changed.items()}
    llm.update_weights(narrow)
    before = compile_counts().requested
    llm.update_weights(narrow)
    llm.update_weights({k: np.asarray(v).astype(ml_dtypes.bfloat16) for k, v in narrow.items()})
    assert compile_counts().requested == before
    assert llm.params[Q_PROJ].dtype == jnp.float32
    np.testing.assert_array_equal(llm.params[Q_PROJ], np.asarray(narrow[Q_PROJ], np.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({Q_PROJ: None}, rf"{Q_PROJ}: missing, expected float32\[64, 32\]"),
        ({"lm_tail": np.zeros(3, np.float32)}, "lm_tail: the model has no such weight"),
        ({NORM: np.zeros((3, 2), np.float32)}, rf"{NORM}: float32\[3, 2\], expected float32\[32\]"),
        (
            {NORM: np.zeros(32, np.int32)},
            rf"{NORM}: int32\[32\], expected float32\[32\] or .*float",
        ),
        ({NORM: [np.ones(32)]}, rf"{NORM}.0: the model has no such weight"),
        ({NORM: "x"}, rf"{NORM}: a str, expected an array float32\[32\]"),
    ],
    ids=["missing", "surplus", "shape", "dtype", "nested", "text"],
)
def test_what_does_not_fit_is_named_with_what_is_expected(llm, original, change, message):
    before = greedy(llm)
    weights = {k: v for k, v in {**original, **change}.items() if v is not None}
    with pytest.raises(WeightsError, match=message):
        llm.update_weights(weights)
    assert greedy(llm) == before


def test_deleted_and_traced_arrays_are_refused(llm, original):
    gone = jnp.copy(original[NORM])
    gone.delete()
    with pytest.raises(WeightsError, match=f"{NORM}: its buffer is gone"):
        llm.update_weights({**original, NORM: gone})
    with pytest.raises(WeightsError, match=f"{NORM}: a traced value"):
        jax.jit(lambda norm: llm.update_weights({**original, NORM: norm}))(original[NORM])
    with pytest.raises(WeightsError, match="a list has no named leaves"):
        llm.update_weights([1])


def test_tied_embeddings_take_an_equal_head_only():
    tied = start("smollm2", enforce_eager=True)
    params = tied.params
    assert "lm_head.weight" not in params
    embedding = params["model.embed_tokens.weight"]
    tied.update_weights({**params, "lm_head.weight": embedding})
    tied.update_weights({**params, "lm_head.weight": np.asarray(embedding)})
    with pytest.raises(WeightsError, match=r"lm_head.weight: differs from model.embed_tokens"):
        tied.update_weights({**params, "lm_head.weight": embedding + 1})


def test_checkpoints_with_and_without_a_config(llm, original, changed, tmp_path):
    arrays = {name: np.asarray(array) for name, array in changed.items()}
    save_file(arrays, tmp_path / "step.safetensors")
    llm.update_weights(changed)
    expected = greedy(llm)
    llm.update_weights(original)
    llm.update_weights(tmp_path)
    assert greedy(llm) == expected
    llm.update_weights(str(DATA / "qwen3"))
    assert greedy(llm) != expected
    with pytest.raises(WeightsError, match=r"qk_norm: False in .*llama31, expected True"):
        llm.update_weights(str(DATA / "llama31"))
    config = json.loads((DATA / "qwen3" / "config.json").read_text())
    config["rms_norm_eps"] = float(np.float32(config["rms_norm_eps"]))  # as GGUF keeps it
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm.update_weights(tmp_path)
    assert greedy(llm) == expected
    with pytest.raises(CheckpointError, match="nowhere"):
        llm.update_weights("nowhere")
    arrays.pop(NORM)
    save_file(arrays, tmp_path / "step.safetensors")
    with pytest.raises(TensorMismatchError, match=NORM):
        llm.update_weights(tmp_path)


def test_weights_are_moved_to_a_mesh_of_several_devices(llm, changed):
    sharded = start("qwen3", enforce_eager=True, tensor_parallel_size=2)
    shardings = {name: array.sharding for name, array in sharded.params.items()}
    sharded.update_weights(changed)
    assert {name: array.sharding for name, array in sharded.params.items()} == shardings
    llm.update_weights(sharded.params)
    assert greedy(llm) == greedy(sharded)


@pytest.mark.parametrize("use_async", [False, True])
def test_running_requests_are_refused_aborted_or_recomputed(original, changed, use_async):
    engine = start("qwen3", enforce_eager=True, async_scheduling=use_async)
    steps = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)

    def begin(count):
        stream = engine.stream(PROMPT, steps)
        for _ in range(count):
            output = next(stream)
        return stream, list(output.outputs[0].token_ids)

    stream, _ = begin(5)
    with pytest.raises(BusyError, match="update_weights with 1 unfinished"):
        engine.update_weights(changed)
    with pytest.raises(BusyError, match="sleep with 1 unfinished"):
        engine.sleep()
    engine.update_weights(changed, running="abort")
    last = list(stream)[-1].outputs[0]
    assert last.finish_reason == "abort" and len(last.token_ids) >= 5
    assert not engine._engine.core.has_unfinished

    engine.update_weights(original)
    stream, early = begin(5)
    engine.update_weights(changed, running="recompute")
    whole = list(stream)[-1].outputs[0].token_ids
    assert whole[:5] == early and len(whole) == 20
    # A step in flight ran with the old weights. From then on it is as if the new ones had been
    # there all the time.
    kept = 5 + use_async
    asked = {"prompt_token_ids": PROMPT["prompt_token_ids"] + whole[:kept]}
    rest = SamplingParams(temperature=0, max_tokens=20 - kept, ignore_eos=True)
    assert tokens(engine.generate([asked], rest, use_tqdm=False))[0] == whole[kept:]

    with pytest.raises(ParameterError, match="running='wait'"):
        engine.update_weights(changed, running="wait")


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_the_memory_back(level, original):
    before = live_bytes()
    engine = start("qwen3", enforce_eager=True)
    held = live_bytes() - before
    runner = engine._engine.runner
    weights = sum(array.nbytes for array in engine.params.values())
    pools = sum(array.nbytes for array in (*runner._k_pools, *runner._v_pools))
    assert held >= weights + pools
    expected = greedy(engine)
    compiled = compile_counts().requested
    engine.sleep(level)
    assert engine.is_sleeping
    # What is left: last tokens of the slots, and constants.
    assert live_bytes() - before < 0.01 * held
    with pytest.raises(AsleepError, match="host memory" if level == 1 else "discarded"):
        greedy(engine)
    with pytest.raises(AsleepError):
        _ = engine.params
    engine.wake_up(["weights"])
    assert engine.is_sleeping
    engine.wake_up()
    if level == 2:
        assert engine.is_sleeping
        with pytest.raises(AsleepError, match="update_weights"):
            greedy(engine)
        engine.update_weights(original)
    assert not engine.is_sleeping
    assert greedy(engine) == expected
    assert compile_counts().requested == compiled


def test_sleeping_deeper_updating_asleep_and_waking_twice(llm, original, changed):
    before = greedy(llm)
    llm.sleep()
    llm.sleep()
    llm.update_weights(original)
    with pytest.raises(AsleepError, match="without its KV pool"):
        greedy(llm)
    llm.wake_up(["kv_cache"])
    llm.wake_up()
    assert greedy(llm) == before
    llm.sleep(1)
    llm.sleep(2)
    llm.wake_up()
    with pytest.raises(AsleepError, match="update_weights"):
        greedy(llm)
    llm.update_weights(changed)
    assert greedy(llm) != before
    with pytest.raises(ParameterError, match="level=3"):
        llm.sleep(3)
    with pytest.raises(ParameterError, match="tags='pool'"):
        llm.wake_up(["pool"])


def test_a_stream_sleeps_with_its_engine(llm):
    steps = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    whole = tokens(llm.generate([PROMPT], steps, use_tqdm=False))[0]
    stream = llm.stream(PROMPT, steps)
    next(stream)
    llm.sleep(running="recompute")
    llm.wake_up()
    assert list(stream)[-1].outputs[0].token_ids == whole
    stream = llm.stream(PROMPT, steps)
    next(stream)
    llm.sleep(running="abort")
    assert list(stream)[-1].outputs[0].finish_reason == "abort"
    llm.wake_up()
    stream = llm.stream(PROMPT, steps)
    next(stream)
    llm.sleep(running="recompute")
    with pytest.raises(AsleepError):
        next(stream)
    llm.wake_up()
    assert greedy(llm)[:12] == whole


def test_samples_of_a_prompt_share_its_blocks(llm):
    llm.reset_prefix_cache()
    before = llm.get_metrics()
    params = SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=4, ignore_eos=True)
    llm.generate([PROMPT], params, use_tqdm=False)
    after = llm.get_metrics()
    # Of three blocks two are shared: the last token of a prompt is always computed.
    assert after["prefix_cache_queries"] - before["prefix_cache_queries"] == 4 * 24
    assert after["prefix_cache_hits"] - before["prefix_cache_hits"] == 3 * 16


def rollout(engine, **options):
    """(token ids of prompt and output, logprobs of the 40 sampled ones)."""
    given = {"max_tokens": 40, "temperature": 1.0, "seed": 7, "ignore_eos": True, **options}
    output = engine.generate([PROMPT], SamplingParams(logprobs=0, **given), use_tqdm=False)[0]
    sample = output.outputs[0]
    found = [
        entry[token].logprob for entry, token in zip(sample.logprobs, sample.token_ids, strict=True)
    ]
    return jnp.asarray(output.prompt_token_ids + sample.token_ids), np.asarray(found, np.float32)


def score(engine, ids):
    scored = engine.score({"prompt_token_ids": ids[:-40].tolist()}, ids[-40:].tolist())
    return np.asarray(scored.logprobs, np.float32)


@pytest.mark.parametrize("name", ["qwen3", "llama31", "smollm2"])
def test_sampled_logprobs_are_those_of_the_trainers_forward_pass_to_the_bit(name):
    engine = start(name, enforce_eager=True)
    ids, sampled = rollout(engine)
    trained = jax.jit(engine.model.token_logprobs)(engine.params, ids)[-40:]
    np.testing.assert_array_equal(sampled, trained)
    module = engine.model.module(engine.params)
    dense = jax.nn.log_softmax(module(ids, jnp.arange(len(ids))))
    dense = jnp.take_along_axis(dense[:-1], ids[1:, None], axis=-1)[-40:, 0]
    np.testing.assert_allclose(sampled, dense, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "float32"])
def test_they_are_in_bfloat16_too(kv_cache_dtype):
    engine = start("qwen3", enforce_eager=True, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype)
    ids, sampled = rollout(engine)
    trained = jax.jit(engine.model.token_logprobs)(engine.params, ids)[-40:]
    np.testing.assert_array_equal(sampled, trained)


@pytest.mark.parametrize(("name", "backend"), [("qwen3", "xla"), ("mistral", "auto")])
def test_with_other_kernels_and_with_windows_they_are_close(name, backend):
    engine = start(name, enforce_eager=True, attention_backend=backend)
    ids, sampled = rollout(engine)
    trained = jax.jit(engine.model.token_logprobs)(engine.params, ids)[-40:]
    np.testing.assert_allclose(sampled, trained, rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_plain_arithmetic():
    recorded = load("mistral")  # has a window
    engine = start("mistral", enforce_eager=True)
    ids = jnp.asarray(np.stack([ids[:30] for ids, _ in recorded.sequences]))

    def mean(model):
        return lambda params: jnp.mean(model.token_logprobs(params, ids))

    value, gradients = jax.jit(jax.value_and_grad(mean(engine.model)))(engine.params)
    plain, expected = jax.jit(jax.value_and_grad(mean(recorded.model)))(recorded.params)
    assert float(value) == pytest.approx(float(plain), abs=1e-5)
    for name, gradient in gradients.items():
        scale = float(jnp.max(jnp.abs(expected[name])))
        np.testing.assert_allclose(gradient, expected[name], rtol=0, atol=1e-4 * scale)


def test_processed_logprobs_are_those_of_the_trainer_at_the_same_temperature():
    engine = start("qwen3", enforce_eager=True, logprobs_mode="processed_logprobs")
    ids, sampled = rollout(engine, temperature=0.7)
    logits = engine.model.apply(engine.params, ids)[:-1] / 0.7
    trained = jnp.take_along_axis(jax.nn.log_softmax(logits), ids[1:, None], axis=-1)[-40:, 0]
    np.testing.assert_allclose(sampled, trained, rtol=1e-5, atol=1e-5)


def test_a_score_by_the_engine_is_the_sampled_logprobs_to_the_bit(llm):
    llm.reset_prefix_cache()
    ids, sampled = rollout(llm)
    np.testing.assert_array_equal(score(llm, ids), sampled)


def test_a_gradient_step_on_the_live_weights_raises_what_it_should(llm):
    ids, sampled = rollout(llm)

    def loss(params):
        return -jnp.mean(llm.model.token_logprobs(params, ids)[-40:])

    value, gradients = jax.jit(jax.value_and_grad(loss))(llm.params)
    assert float(value) == pytest.approx(-sampled.mean(), abs=1e-5)
    llm.update_weights(jax.tree.map(lambda p, g: p - 0.05 * g, llm.params, gradients))
    assert score(llm, ids).sum() > sampled.sum()


def test_a_flax_module_has_gradients_under_the_same_names(llm):
    module = llm.model.module(llm.params)
    ids = jnp.arange(1, 20)

    def loss(module):
        return -jnp.mean(jax.nn.log_softmax(module(ids, jnp.arange(19))))

    gradients = nnx.grad(loss)(module)
    names = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(gradients)}
    assert names == set(llm.params)


def test_importing_the_client_needs_no_jax():
    import subprocess
    import sys

    code = (
        "import sys; from jaxllm.client import Client, AsyncClient; sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
