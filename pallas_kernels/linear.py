"""x W^T with W [N, K] as checkpoints store it: the C++ kernel on CPUs, XLA elsewhere.

XLA's CPU products of bf16 weights run far below memory speed at few rows and below its own f32 ones
at many, most of all without AVX-512 (measured in docs/cpu_kernels.md). The kernel reads bf16, f16
or f32 weights as they are and sums in f32. Each of its results is one dot product added up in a
fixed order, so a row's bits do not depend on how many rows come with it. Rows of zeros at the end
of x, the padding of a batch, cost nothing: their results are zeros, which is what a product would
give beside finite weights.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import cpu_library

DTYPES = ("float32", "bfloat16", "float16")
IMPLEMENTATIONS = ("auto", "ffi", "xla")

# XLA:CPU takes a slow matrix-vector path for fewer rows of narrow floats than this.
_LEAST_ROWS = 8


class LinearError(ValueError):
    """A product that cannot be done; the message names the offending value."""


def linear(
    x: jax.Array,
    w: jax.Array,
    out_dtype: jax.typing.DTypeLike | None = None,
    *,
    scale: jax.Array | None = None,
    impl: str = "auto",
) -> jax.Array:
    """x [M, K] times the transpose of w [N, K]: [M, N] in out_dtype (default: that of x).

    x, w and the result are f32, bf16 or f16, in any combination; sums are f32. bf16 weights meet x
    in f32, except where the CPU multiplies bf16 pairs (AVX-512-BF16) and on the XLA path: there x
    is rounded to bf16 first. w may be int8 with scale f32 [N], the value of one step in each of its
    rows: column n of the result is scale[n] times that of the integers. Those meet x in its dtype
    (XLA), or, in the kernel, each row of x rounded to int16 with a step of its own (15 bits and a
    sign up to K = 4096, fewer beyond, so that no sum leaves int32); a row with an infinity or a
    NaN gives NaN.

    impl: "ffi" (the C++ kernel, on CPUs), "xla", or "auto": the kernel when compiling for a CPU
    where it loads, unless JAXLLM_CPU_KERNELS says otherwise. LinearError for shapes, dtypes or
    names outside this, and for "ffi" where the kernel cannot be had.
    """
    out = jnp.dtype(out_dtype or x.dtype)
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise LinearError(f"x must be [M, K] and w [N, K]: got {x.shape} and {w.shape}")
    for dtype in (x.dtype, out) if scale is not None else (x.dtype, w.dtype, out):
        if dtype.name not in DTYPES:
            raise LinearError(f"dtype {dtype.name} is not one of {', '.join(DTYPES)}")
    if scale is not None and (w.dtype != jnp.int8 or scale.shape != w.shape[:1]):
        raise LinearError(
            f"a scale is f32 [N] for w int8 [N, K]: got {scale.shape} for {w.dtype.name} {w.shape}"
        )
    if select_impl(impl) == "xla":
        return _by_xla(x, w, scale, out)
    call = jax.ffi.ffi_call(cpu_library.LINEAR, jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), out))
    steps = jnp.zeros(0, jnp.float32) if scale is None else scale.astype(jnp.float32)
    return call(x, w, steps, isa=np.int32(cpu_library.isa_level()))


def select_impl(impl: str = "auto") -> str:
    """The implementation that `linear` takes for `impl`: "ffi" or "xla"."""
    if impl not in IMPLEMENTATIONS:
        raise LinearError(f"impl {impl!r} is not one of {', '.join(IMPLEMENTATIONS)}")
    if impl == "auto" and not cpu_library.compiling_for_cpu():
        return "xla"
    if impl == "xla":
        return impl
    reason = cpu_library.unavailable()
    if reason is None:
        return "ffi"
    if impl == "ffi" or cpu_library.mode() == "ffi":
        raise LinearError(f"the CPU kernel cannot be used: {reason}")
    return "xla"


def _by_xla(x: jax.Array, w: jax.Array, scale: jax.Array | None, out: np.dtype) -> jax.Array:
    """The same product by XLA, with f32 sums."""
    rows = x.shape[0]
    if scale is not None:
        w = w.astype(x.dtype)  # exact: bf16 has the integers to 256
    # Narrow weights stay as they are, since widening them would write them all to memory; x gives.
    if {w.dtype.name, x.dtype.name} == {"bfloat16", "float16"}:
        x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    else:
        x = x.astype(w.dtype)
    pad = max(0, _LEAST_ROWS - rows) if w.dtype.itemsize == 2 else 0
    if pad:
        x = jnp.pad(x, ((0, pad), (0, 0)))
    contract_last = (((1,), (1,)), ((), ()))
    product = lax.dot_general(x, w, contract_last, preferred_element_type=jnp.float32)
    product = product[:rows]
    return (product if scale is None else product * scale).astype(out)
