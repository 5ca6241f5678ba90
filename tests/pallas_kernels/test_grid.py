"""The property grid against every implementation; GPU kernels are interpreted, Mosaic's with race
detection.
"""

import jax.numpy as jnp
import pytest

from pallas_kernels.paged_attention import mosaic, pool_dtype, triton, xla
from pallas_kernels.paged_attention.contract import check_call
from pallas_kernels.testing.grid import GRID, GridCase, check_case
from pallas_kernels.testing.interpret import mosaic_attend, race_detection, triton_attend

pytestmark = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning",
    "ignore:invalid value encountered in matmul:RuntimeWarning",
)


def refusal(module, case: GridCase) -> str | None:
    options = dict.fromkeys(("window", "soft_cap", "sinks", "k_scale", "v_scale"), None)
    options |= case.options() | {"return_lse": True, "decode": case.decode, "kv_dtype": None}
    return module.refusal(check_call(*case.batch().operands(), **options))


@pytest.mark.parametrize("case", GRID, ids=str)
def test_xla(case):
    assert refusal(xla, case) is None
    check_case(case, xla.attend)


NARROW = [case for case in GRID if pool_dtype(case.kv_dtype, "cpu") != jnp.dtype(case.kv_dtype)]


@pytest.mark.parametrize("case", NARROW[2::3], ids=str)
def test_xla_on_a_pool_of_bits(case):
    check_case(case, xla.attend, platform="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("case", GRID, ids=str)
def test_triton(case):
    assert refusal(triton, case) is None
    check_case(case, triton_attend(splits=case.splits))


# Two cases whose features the others share with this kernel are left out: its interpreter is slow.
INTERPRETED = [c for i, c in enumerate(GRID) if c.dtype != "float32" and i not in (4, 8)]


@pytest.mark.slow
@pytest.mark.parametrize("case", INTERPRETED, ids=str)
def test_mosaic(case):
    assert refusal(mosaic, case) is None
    with race_detection():
        check_case(case, mosaic_attend(splits=case.splits))


def test_mosaic_refuses_what_wgmma_would_round():
    (case,) = [c for c in GRID if c.dtype == "float32"]
    assert "float32" in refusal(mosaic, case)
    mixed = GridCase(queries=[1], contexts=[5], dtype="float16", kv_dtype="bfloat16")
    assert "bfloat16 with float16" in refusal(mosaic, mixed)


def test_gpu_kernels_refuse_what_they_have_no_tiles_for():
    odd = GridCase(queries=[1], contexts=[5], head_dim=40)
    for module in (mosaic, triton):
        assert "head_dim 40" in refusal(module, odd)
    assert refusal(xla, odd) is None
    small = GridCase(queries=[1], contexts=[5], block_size=4)
    assert "block size 4" in refusal(mosaic, small)
