"""Implementations of paged attention by name, imported when first asked for, and the choice.

An implementation is a module (or any object) with

    attend(q, k_pool, v_pool, block_tables, context_lens, query_starts, **options)
        -> out, or (out, lse)
    attend_and_write(q, k, v, k_pool, v_pool, block_tables, context_lens, query_starts, slots,
                     **options)
        -> (out, k_pool, v_pool), or ((out, lse), k_pool, v_pool)
    refusal(case: Case)
        -> None, or why it cannot do this case
    unavailable()
        -> None, or why it cannot run in this process at all

of which all but `attend` may be missing. The options are scale, window, soft_cap, sinks, k_scale,
v_scale, return_lse, decode and kv_dtype; they arrive checked, kv_dtype as a numpy dtype.
"""

import functools
import importlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels.paged_attention.contract import Case, UnsupportedError

logger = logging.getLogger(__name__)

CPU_KERNELS_VARIABLE = "JAXLLM_CPU_KERNELS"


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute paged attention. See the module's docstring for the functions."""

    name: str
    attend: Callable[..., Any]
    attend_and_write: Callable[..., Any] | None = None
    refusal: Callable[[Case], str | None] = lambda case: None
    unavailable: Callable[[], str | None] = lambda: None


def _from_module(name: str, module_name: str) -> Implementation:
    module = importlib.import_module(module_name)
    optional = {
        field: getattr(module, field)
        for field in ("attend_and_write", "refusal", "unavailable")
        if hasattr(module, field)
    }
    return Implementation(name, module.attend, **optional)


def _builtin(name: str) -> Callable[[], Implementation]:
    return functools.partial(_from_module, name, f"pallas_kernels.paged_attention.{name}")


_LOADERS: dict[str, Callable[[], Implementation]] = {
    name: _builtin(name) for name in ("mosaic", "triton", "cpu", "xla")
}


def register_implementation(
    name: str,
    attend: Callable[..., Any],
    *,
    attend_and_write: Callable[..., Any] | None = None,
    refusal: Callable[[Case], str | None] | None = None,
) -> None:
    """Make `attend` available as impl=`name`, once per name; "auto" never picks it."""
    if name == "auto" or name in _LOADERS:
        raise UnsupportedError(f"an implementation named {name!r} exists already")
    own = Implementation(name, attend, attend_and_write, refusal or (lambda case: None))
    _LOADERS[name] = lambda: own


def get_implementation(name: str) -> Implementation:
    """The implementation registered as `name`; UnsupportedError if there is none."""
    if name not in _LOADERS:
        raise UnsupportedError(f"impl {name!r} is not one of {', '.join(['auto', *_LOADERS])}")
    return _LOADERS[name]()


def _reason_missing(name: str) -> str | None:
    """Why `name` cannot run in this process, or None."""
    try:
        return get_implementation(name).unavailable()
    except ImportError as error:
        return f"cannot be imported: {error}"


def available_implementations() -> dict[str, str | None]:
    """Every registered name, with None where it can run here or the reason why it cannot."""
    return {name: _reason_missing(name) for name in _LOADERS}


@functools.cache
def _say_once(level: int, message: str) -> None:
    logger.log(level, message)


def select_impl(
    impl: str = "auto",
    *,
    platform: str | None = None,
    compute_capability: str | None = None,
    case: Case | None = None,
) -> str:
    """The name of the implementation to use, said once in the log.

    A name other than "auto" is checked and returned. "auto" goes by the platform ("cpu", "gpu",
    "cuda", ...; default: that of the surrounding abstract mesh, else of the default backend): on a
    CPU the C++ kernels where they load (JAXLLM_CPU_KERNELS=ffi insists on them, =xla turns them
    off), on NVIDIA GPUs `mosaic` for compute capability 9.x (it is written for Hopper's wgmma),
    `triton` from 8.0, and `xla` everywhere else. With a `case` that the first choice refuses, the
    next is taken, and the log says why. Raises UnsupportedError where a named implementation is
    unknown, cannot run here or refuses the case.
    """
    if impl != "auto":
        refuse_unless_possible(impl, case)
        return impl
    if platform is None:
        platform, compute_capability = _target()
    reasons: list[str] = []
    for name in _candidates(platform, compute_capability):
        reason = _reason_missing(name) or (case and get_implementation(name).refusal(case))
        if reason is None:
            because = f" ({'; '.join(reasons)})" if reasons else ""
            where = f"{platform} {compute_capability}" if compute_capability else platform
            level = logging.WARNING if reasons else logging.INFO
            _say_once(level, f"paged attention on {where}: {name}{because}")
            return name
        reasons.append(f"{name}: {reason}")
    raise UnsupportedError(
        f"no implementation of paged attention for {platform}: {'; '.join(reasons)}"
    )


def refuse_unless_possible(name: str, case: Case | None) -> None:
    """Raise UnsupportedError unless `name` exists, can run in this process and accepts `case`."""
    implementation = get_implementation(name)
    reason = implementation.unavailable() or (case and implementation.refusal(case))
    if reason:
        raise UnsupportedError(f"impl {name!r}: {reason}")


def _candidates(platform: str, compute_capability: str | None) -> list[str]:
    """What "auto" tries, best first."""
    if platform == "cpu":
        wanted = os.environ.get(CPU_KERNELS_VARIABLE, "")
        if wanted not in ("", "ffi", "xla"):
            raise UnsupportedError(f"{CPU_KERNELS_VARIABLE}={wanted!r} is not one of ffi, xla")
        return {"ffi": ["cpu"], "xla": ["xla"]}.get(wanted, ["cpu", "xla"])
    if platform in ("gpu", "cuda") and compute_capability:
        major = int(compute_capability.split(".")[0])
        if major == 9:
            return ["mosaic", "triton", "xla"]
        if major >= 8:
            return ["triton", "xla"]
    return ["xla"]


def _target() -> tuple[str, str | None]:
    """Platform and compute capability that is being compiled for."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if device is not None and getattr(device, "platform", None):
        return device.platform, _capability_of_kind(device.device_kind)
    local = jax.local_devices()[0]
    return local.platform, getattr(local, "compute_capability", None)


def _capability_of_kind(device_kind: str) -> str | None:
    """Compute capability by the name of the part, for compiles without a device."""
    names = {
        "9.0": ("H100", "H200", "H20", "GH200"),
        "8.9": ("L4", "L40", "L40S", "4090"),
        "8.6": ("A10", "A40", "A6000", "3090"),
        "8.0": ("A100", "A30"),
    }
    known = {name: capability for capability, parts in names.items() for name in parts}
    return next((known[word] for word in reversed(device_kind.split()) if word in known), None)
