"""GGUF files of every tensor type against the logits transformers gives on dequantised weights."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.checkpoints.load import load_params
from jaxllm.checkpoints.resolve import resolve
from jaxllm.execution.mesh import make_mesh
from jaxllm.execution.parameters import FunctionalModel
from jaxllm.models.layers import Ops
from jaxllm.models.registry import find_family
from tests.models.families import DATA

FILES = sorted(path.stem for path in (DATA / "gguf").glob("*.gguf"))
RECORDING = np.load(DATA / "gguf" / "recording.npz")


@pytest.mark.parametrize("name", FILES)
def test_logits_equal_the_recording(name):
    checkpoint = resolve(DATA / "gguf" / f"{name}.gguf")
    family = find_family(checkpoint.config)
    config = family.read_config(checkpoint.config)
    model = FunctionalModel.build(family, config, jnp.float32, make_mesh(1), Ops())
    params = load_params(checkpoint, model.abstract, progress=False)
    ids = RECORDING[f"{name}.ids"]
    logits = model.bind(params)(jnp.asarray(ids), jnp.arange(len(ids)))
    expected = RECORDING[f"{name}.logits"]
    scale = np.abs(expected).max()
    np.testing.assert_allclose(logits[-16:], expected, atol=1e-4 * max(1.0, scale), rtol=0)
