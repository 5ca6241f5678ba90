"""The recorded tiny models: their weights as a functional model, and what transformers gave."""

import functools
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.checkpoints.load import load_params
from jaxllm.checkpoints.resolve import resolve
from jaxllm.execution.mesh import make_mesh
from jaxllm.execution.parameters import FunctionalModel
from jaxllm.models.layers import Ops
from jaxllm.models.registry import find_family

DATA = Path(__file__).parent.parent / "golden" / "data"
FAMILIES = sorted(
    path.parent.name
    for path in DATA.glob("*/recording.npz")
    if (path.parent / "config.json").exists()
)


@dataclass(frozen=True)
class Recorded:
    model: FunctionalModel
    params: dict[str, jax.Array]
    sequences: list[tuple[np.ndarray, np.ndarray]]
    """(token ids [S], float32 logits [S, V])"""


@functools.cache
def load(name: str, tensor_parallel_size: int = 1) -> Recorded:
    checkpoint = resolve(DATA / name)
    family = find_family(checkpoint.config)
    config = family.read_config(checkpoint.config)
    mesh = make_mesh(tensor_parallel_size)
    model = FunctionalModel.build(family, config, jnp.float32, mesh, Ops())
    params = load_params(checkpoint, model.abstract, ignore=model.ignored_names, progress=False)
    recording = np.load(DATA / name / "recording.npz")
    sequences = [
        (recording[f"ids_{i}"], recording[f"logits_{i}"])
        for i in range(9)
        if f"ids_{i}" in recording
    ]
    return Recorded(model, params, sequences)
