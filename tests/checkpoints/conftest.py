"""Small checkpoints, written by the formats' own libraries."""

import json
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import save_file

Tensors = dict[str, np.ndarray]

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
}


@pytest.fixture
def tensors() -> Tensors:
    rng = np.random.default_rng(0)

    def normal(*shape: int, dtype: type = ml_dtypes.bfloat16) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    return {
        "model.embed_tokens.weight": normal(32, 16),
        "model.layers.0.self_attn.q_proj.weight": normal(16, 16),
        "model.layers.0.mlp.down_proj.weight": normal(16, 64),
        "model.layers.0.input_layernorm.weight": normal(16, dtype=np.float32),
        "model.norm.weight": normal(16, dtype=np.float16),
    }


@pytest.fixture
def write_folder(tmp_path: Path) -> Callable[..., Path]:
    def write(tensors: Tensors, *, shards: int = 0, name: str = "model") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG))
        if not shards:
            save_file(tensors, folder / "model.safetensors")
            return folder
        weight_map: dict[str, str] = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
            part = dict(list(tensors.items())[shard::shards])
            save_file(part, folder / file)
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    return write


@pytest.fixture
def mesh() -> Callable[..., Mesh]:
    def make(*sizes: int) -> Mesh:
        names = ("data", "tensor")[-len(sizes) :]
        devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
        return Mesh(devices, names)

    return make
