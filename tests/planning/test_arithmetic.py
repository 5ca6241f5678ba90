import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.errors import ParameterError
from jaxllm.planning import full_length_requests, kv_bytes_per_token, kv_token_budget


def test_llama_8b_on_80_gib():
    per_token = kv_bytes_per_token(32, 8, 128, 2)
    assert per_token == 131072
    tokens = kv_token_budget(80, 0.90, 15, 3, per_token)
    assert tokens == 442368
    assert full_length_requests(tokens, 16384) == 27


def test_llama_70b_on_four():
    per_token = kv_bytes_per_token(80, 8, 128, 2, tp=4)
    assert per_token == 81920
    assert kv_token_budget(80, 0.90, 33, 4, per_token) == 458752


def test_heads_that_do_not_divide_are_repeated():
    one_head = kv_bytes_per_token(1, 1, 64, 2)
    assert kv_bytes_per_token(1, 8, 64, 2, tp=16) == one_head
    assert kv_bytes_per_token(1, 2, 64, 2, tp=8) == one_head
    # 6 heads over 4 devices: 12 copies, 3 on each.
    assert kv_bytes_per_token(1, 6, 64, 2, tp=4) == 3 * one_head


@given(
    layers=st.integers(1, 100),
    heads=st.integers(1, 16),
    doublings=st.integers(0, 4),
    dim=st.sampled_from([64, 80, 128]),
)
def test_tensor_parallelism_divides_the_heads(layers, heads, doublings, dim):
    tp = 2**doublings
    whole = kv_bytes_per_token(layers, heads * tp, dim, 2)
    assert kv_bytes_per_token(layers, heads * tp, dim, 2, tp) * tp == whole


@given(
    gpu=st.floats(1, 200),
    more=st.floats(0, 100),
    util=st.floats(0.1, 1),
    weights=st.floats(0, 200),
    reserve=st.floats(0, 10),
    per_token=st.integers(1, 10**6),
)
def test_more_memory_never_holds_fewer_tokens(gpu, more, util, weights, reserve, per_token):
    tokens = kv_token_budget(gpu, util, weights, reserve, per_token)
    assert 0 <= tokens <= kv_token_budget(gpu + more, util, weights, reserve, per_token)
    if tokens:
        used = weights + reserve + tokens * per_token / 2**30
        assert used <= gpu * util or math.isclose(used, gpu * util, abs_tol=1e-6)


def test_nothing_left_is_zero():
    assert kv_token_budget(16, 0.9, 15, 3, 131072) == 0


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: kv_bytes_per_token(0, 8, 128, 2), "layers"),
        (lambda: kv_bytes_per_token(32, 8, 128, 2, tp=0), "tp"),
        (lambda: kv_token_budget(80, 1.5, 15, 3, 131072), "util"),
        (lambda: kv_token_budget(80, 0.9, -1, 3, 131072), "weights_gib"),
        (lambda: kv_token_budget(80, 0.9, 15, 3, 0), "per_token"),
        (lambda: full_length_requests(100, 0), "max_model_len"),
    ],
)
def test_wrong_arguments_are_named(call, field):
    with pytest.raises(ParameterError) as error:
        call()
    assert error.value.field == field


def test_the_arithmetic_and_the_simulator_run_without_jax():
    code = (
        "import sys, jaxllm.planning, jaxllm.planning.simulate, jaxllm.planning.commands; "
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
