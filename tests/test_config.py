import argparse
import dataclasses

import pytest

from jaxllm.config import (
    ALIASES,
    EngineConfig,
    add_arguments,
    from_arguments,
    parse_bytes,
    parse_length,
)
from jaxllm.errors import ConfigError


def parse(*words: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_arguments(parser.parse_args(words))


def test_sizes_and_lengths():
    assert parse_bytes("2GiB") == 2 * 2**30
    assert parse_bytes("1.5m") == 3 * 2**19
    assert parse_bytes(100) == 100
    assert (parse_length("32k"), parse_length("32K"), parse_length("7")) == (32000, 32768, 7)
    assert parse_length("auto") == parse_length(-1) == "auto"
    for bad in ("", "GiB", "2 apples", "-5"):
        with pytest.raises(ValueError):
            parse_bytes(bad)
    with pytest.raises(ValueError):
        parse_length("long")


def test_every_field_is_a_flag_with_help():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    actions = {action.dest: action for action in parser._actions}
    for field in dataclasses.fields(EngineConfig):
        assert actions[field.name].help
    for name, flags in ALIASES.items():
        assert set(flags) <= set(actions[name].option_strings)


def test_flags_that_are_not_given_keep_their_defaults():
    assert parse() == EngineConfig()


def test_flags_become_settings():
    config = parse(
        "--model", "m", "--max-model-len", "4k", "--no-enable-prefix-caching", "--dtype", "float32",
        "--kv-cache-memory-bytes", "1GiB", "--num-gpu-blocks-override", "17", "--async-scheduling",
        "--gpu-memory-utilization", "0.5", "--max-logprobs", "-1",
    )  # fmt: skip
    assert config == EngineConfig(
        model="m", max_model_len=4000, enable_prefix_caching=False, dtype="float32",
        kv_cache_memory=2**30, num_blocks=17, async_scheduling=True, gpu_memory_utilization=0.5,
        max_logprobs=-1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int3"}, "dtype='int3': one of auto"),
        ({"max_num_seqs": 0}, "max_num_seqs=0: an integer of at least 1"),
        ({"max_num_seqs": 2.5}, "max_num_seqs=2.5"),
        ({"num_blocks": 1}, "num_blocks=1: an integer of at least 2"),
        ({"max_model_len": 1}, "max_model_len=1: at least 2"),
        ({"max_model_len": "long"}, "max_model_len: 'long' is not a length"),
        ({"kv_cache_memory": "much"}, "kv_cache_memory: 'much' is not a size"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5"),
        ({"max_logprobs": 0}, "max_logprobs=0: an integer of at least 1, or -1"),
        ({"max_logprobs": -2}, "max_logprobs=-2"),
        ({"max_logprobs": None}, "max_logprobs=None"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy='lifo': one of fcfs, priority"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)
