"""int8 weights: matrices rounded row by row once they are on their devices.

Weight-only, symmetric, one step per output row; activations stay as they are. A decode step reads
every weight once, so a lone request gains by the bytes that are saved; products of many rows are
bound by arithmetic and do not. docs/engine.md has the accuracy and the speed.
"""

import functools

import jax

from jaxllm.execution.parameters import FunctionalModel, Params
from jaxllm.models.layers import quantize_rows


def prepare(params: Params, model: FunctionalModel) -> Params:
    """Parameters as `model.source` describes them -> as `model.abstract` does.

    `params` is emptied on the way, so that each array can be let go of once it is rounded; the same
    dict comes back where the model keeps its weights as they are.
    """
    if model.source is model.abstract:
        return params
    prepared: Params = {}
    for name in list(params):
        array = params.pop(name)
        scale = f"{name}_scale"
        if scale not in model.abstract:
            prepared[name] = array
            continue
        rounded = _rounding(model.abstract[name].sharding, model.abstract[scale].sharding)
        prepared[name], prepared[scale] = jax.block_until_ready(rounded(array))
    return {name: prepared[name] for name in model.abstract}


@functools.cache
def _rounding(weight: jax.sharding.Sharding, scale: jax.sharding.Sharding) -> "jax.stages.Wrapped":
    return jax.jit(quantize_rows, out_shardings=(weight, scale))
