"""Which arithmetic a model is built with on which platform."""

import jax.numpy as jnp
import numpy as np

from jaxllm.models.layers import Ops


def choose_ops(platform: str, dtype: np.dtype, num_devices: int) -> Ops:
    """Ops for a platform ("cpu", "gpu", ...), the weights' dtype and the mesh's size.

    On a CPU activations stay in float32 between the products: narrow floats have no vector
    arithmetic there, and XLA would convert back and forth around every operation.
    """
    if platform != "cpu":
        return Ops()
    return Ops(activation_dtype=jnp.dtype(jnp.float32))
