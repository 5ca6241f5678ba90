import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.execution.memory import (
    GIB,
    accelerator_pool_bytes,
    bytes_per_block,
    check_capacity,
    cpu_pool_bytes,
    num_blocks_for,
)
from jaxllm.execution.mesh import HeadLayout
from jaxllm.models.config import ModelConfig
from jaxllm.models.rope import RopeConfig

LLAMA_8B = ModelConfig(128256, 4096, 14336, 32, 32, 8, 128, 131072, 1e-5, RopeConfig(5e5))


class Device:
    def __init__(self, limit):
        self.limit = limit

    def memory_stats(self):
        return None if self.limit is None else {"bytes_limit": self.limit}


def test_a_block_holds_k_and_v_of_all_layers():
    block = bytes_per_block(LLAMA_8B, HeadLayout(8, 1), 16, np.dtype("float16"), 1)
    assert block == 16 * 131072
    assert bytes_per_block(LLAMA_8B, HeadLayout(8, 1), 16, np.dtype("float16"), 4) == block // 4
    # Eight devices, two KV heads: each device holds a whole one.
    repeated = bytes_per_block(LLAMA_8B, HeadLayout(16, 2), 16, np.dtype("float16"), 16)
    assert repeated == block // 8


def test_what_is_left_for_the_pool():
    left = accelerator_pool_bytes(Device(80 * GIB), 0.9, 15 * GIB, 2 * GIB, 30)
    assert left == int(80 * GIB * 0.9) - 15 * GIB - 2 * GIB - 30 - GIB // 2


def test_nothing_left_says_where_it_went():
    with pytest.raises(ConfigError, match=r"14\.40 GiB .*parameters 15\.00, a step 1\.00.*raise"):
        accelerator_pool_bytes(Device(16 * GIB), 0.9, 15 * GIB, GIB, 0)
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        accelerator_pool_bytes(Device(None), 0.9, 0, 0, 0)


def test_blocks_come_in_groups_so_that_shapes_repeat():
    assert num_blocks_for(1000 * 10, 10) == 960
    assert num_blocks_for(1000 * 10 + 9, 10) == 960
    assert num_blocks_for(100 * 10, 10) == 100


def test_a_full_length_request_must_fit():
    # Sixteen usable blocks of 32 hold exactly 512 tokens.
    check_capacity(17, 32, 1000, 512)
    with pytest.raises(ConfigError, match=r"holds 512 tokens.*max_model_len=514.*at most 512"):
        check_capacity(17, 32, 1000, 514)


def test_the_default_on_a_cpu_follows_the_machine():
    assert 0 < cpu_pool_bytes() <= 2 * GIB
