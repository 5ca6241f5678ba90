import dataclasses

import pytest

from jaxllm.models.registry import find_family
from jaxllm.planning import activation
from jaxllm.planning.activation import StepShape, activation_bound, can_compile, compile_activation
from jaxllm.planning.device_compile import target_config
from jaxllm.planning.gpus import GPUS, find_gpu
from jaxllm.planning.models_table import MODELS
from jaxllm.planning.plan import plan

TINY = MODELS["smollm2-135m"] | {
    "num_hidden_layers": 3,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 1024,
}
SHAPE = StepShape(4, 256, 1024, 16, "bfloat16", "bfloat16", 1)


def bound(**changes):
    config = find_family(TINY).read_config(TINY)
    found = activation_bound(config, dataclasses.replace(SHAPE, **changes))
    return found.num_bytes - activation.WORKSPACE_BYTES


def test_the_bound_grows_with_the_step():
    # What says how to edit.
    row = 32 * 1024
    rest = SHAPE.max_num_seqs * row
    assert bound(max_num_batched_tokens=512) - rest == 2 * (bound() - rest)
    assert bound(dtype="float32") > bound()
    # With many rows the sampler needs most: seven arrays of logits, and the hidden states.
    states = 2 * 256 * (256 + 4096)
    assert bound(max_num_seqs=4096) == 7 * 4 * 4096 * 1024 + states + 4096 * row
    # Results of the step before.
    assert bound(all_logprobs=True) == bound() + 4 * 4 * 1024


@pytest.mark.parametrize("gpu", GPUS)
def test_every_gpu_has_a_description_for_the_compiler(gpu):
    text = target_config(GPUS[gpu])
    major, minor = GPUS[gpu].compute_capability.split(".")
    assert f"major: {major} minor: {minor}" in text
    assert f"core_count: {GPUS[gpu].multiprocessors}" in text


@pytest.mark.slow
@pytest.mark.skipif(not can_compile(), reason="JAX's CUDA plugin is not installed")
def test_a_compiled_step_stays_below_the_bound():
    shape = dataclasses.replace(SHAPE, all_logprobs=True)
    found = compile_activation(TINY, shape, find_gpu("H200"))
    assert found is not None and found.compiled
    assert "compiled for H200" in found.source
    assert 0 < found.num_bytes <= bound(all_logprobs=True) + activation.WORKSPACE_BYTES
    # Two of logits, those of the step before, and the hidden states, besides temporaries.
    assert found.num_bytes > 3 * 4 * 4 * 1024 + 2 * 256 * 256
    assert "logprobs" in found.source


def test_a_failed_compile_falls_back_and_says_why(monkeypatch, caplog):
    broken = MODELS["llama-3.1-8b"] | {"hidden_act": "gelu"}
    monkeypatch.setattr(activation, "COMPILE_TIMEOUT_S", 120)
    assert compile_activation(broken, SHAPE, find_gpu("H100")) is None
    assert "gelu" in caplog.text


def test_a_plan_uses_what_was_compiled(monkeypatch):
    given = activation.Activation(12_345_678, "step compiled for H100", compiled=True)
    monkeypatch.setattr("jaxllm.planning.plan.can_compile", lambda: True)
    monkeypatch.setattr("jaxllm.planning.plan.compile_activation", lambda *_: given)
    found = plan("llama-3.2-1b", gpu="H100")
    assert found.activation_bytes == 12_345_678
    assert not any("bound by formula" in note for note in found.notes)
    monkeypatch.setattr("jaxllm.planning.plan.can_compile", lambda: False)
    other = plan("llama-3.2-1b", gpu="H100")
    assert other.activation_source == "upper bound by formula"
    assert any("upper bound by formula" in note for note in other.notes)
