"""Finds, builds and loads the C++ CPU kernels, and registers them as XLA custom calls.

The library comes with the package where it was built with a C++ compiler at hand. Where it is
absent or not made from the sources beside it, it is compiled at first use into the user's cache.
Without a compiler `unavailable` says so, and callers serve by plain XLA.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jaxlib

from pallas_kernels import cpu_build

logger = logging.getLogger(__name__)

MODE_VARIABLE = "JAXLLM_CPU_KERNELS"
ISA_VARIABLE = "JAXLLM_CPU_ISA"

# The number is raised with every change of operands or attributes, so that an executable compiled
# against another signature is refused by name.
ATTENTION = "pallas_kernels_cpu_attention_1"
WRITE_AND_ATTEND = "pallas_kernels_cpu_write_and_attend_1"
LINEAR = "pallas_kernels_cpu_linear_2"
ZEROS = "pallas_kernels_cpu_zeros_1"
_SYMBOLS = {
    ATTENTION: "cpu_kernels_attention",
    WRITE_AND_ATTEND: "cpu_kernels_write_and_attend",
    LINEAR: "cpu_kernels_linear",
    ZEROS: "cpu_kernels_zeros",
}


class CpuKernelsError(RuntimeError):
    """The CPU kernels were asked for and cannot be had, or a setting of theirs is wrong."""


@dataclass(frozen=True, slots=True)
class CpuLibrary:
    """The loaded library: its file and the best instruction set of this CPU that it uses."""

    path: Path
    instruction_set: str


def mode() -> str:
    """JAXLLM_CPU_KERNELS: "ffi" (these kernels or an error), "xla" (never these), "" (if they
    load).
    """
    value = os.environ.get(MODE_VARIABLE, "")
    if value not in ("", "ffi", "xla"):
        raise CpuKernelsError(f"{MODE_VARIABLE}={value!r} is not one of ffi, xla")
    return value


def unavailable() -> str | None:
    """Why the kernels cannot be used in this process, or None: then they are registered."""
    if mode() == "xla":
        return f"turned off by {MODE_VARIABLE}=xla"
    try:
        load()
    except (CpuKernelsError, cpu_build.BuildError, OSError) as error:
        return str(error)
    return None


def compiling_for_cpu() -> bool:
    """Whether what is being traced is for CPUs, by the surrounding mesh, else by the default
    backend.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    described = getattr(device, "platform", None)
    return (described or jax.default_backend()) == "cpu"


def isa_level() -> int:
    """The level that JAXLLM_CPU_ISA names (base, avx2, avx512, avx512bf16), for tests; -1, the best
    of the CPU that runs the program, where it is not set. A level the CPU lacks is lowered.
    """
    value = os.environ.get(ISA_VARIABLE)
    if not value:
        return -1
    levels = list(cpu_build.INSTRUCTION_SETS)
    if value not in levels:
        raise CpuKernelsError(f"{ISA_VARIABLE}={value!r} is not one of {', '.join(levels)}")
    return levels.index(value)


def runnable_levels() -> list[str]:
    """The instruction sets that the library has kernels for and this CPU can run, lowest first."""
    if unavailable() is not None:
        return []
    levels = list(cpu_build.INSTRUCTION_SETS)
    return levels[: levels.index(load().instruction_set) + 1]


@functools.cache
def _load_or_reason() -> "CpuLibrary | Exception":
    try:
        return _load()
    except (CpuKernelsError, cpu_build.BuildError, OSError) as error:
        return error


def load() -> CpuLibrary:
    """The library, built if need be, with its targets registered; the same one at every call.

    CpuKernelsError or BuildError where it cannot be had.
    """
    result = _load_or_reason()
    if isinstance(result, Exception):
        raise result
    return result


def _load() -> CpuLibrary:
    packaged = Path(cpu_build.__file__).parent / cpu_build.LIBRARY_NAME
    library = open_current(packaged) or open_current(_cached_path())
    if library is None:
        with _build_lock():
            path = _cached_path()
            library = open_current(path)
            if library is None:
                if cpu_build.find_compiler():
                    logger.warning("compiling the CPU kernels, once, into %s", path)
                cpu_build.build(path, jax.ffi.include_dir())
                library = open_current(path)
    if library is None:
        raise CpuKernelsError(f"{_cached_path()} was built but does not load")
    path, handle = library
    for target, symbol in _SYMBOLS.items():
        jax.ffi.register_ffi_target(
            target, jax.ffi.pycapsule(getattr(handle, symbol)), platform="cpu"
        )
    level = handle.cpu_kernels_supported_level()
    best = list(cpu_build.INSTRUCTION_SETS)[level]
    logger.info("CPU kernels: %s, %s", path, best)
    return CpuLibrary(path, best)


def open_current(path: Path) -> tuple[Path, ctypes.CDLL] | None:
    """The library at `path`, if it is there, made from these sources, and speaks this XLA's FFI."""
    if not path.exists():
        return None
    try:
        handle = ctypes.CDLL(str(path))
        handle.cpu_kernels_source_hash.restype = ctypes.c_char_p
        built_from = handle.cpu_kernels_source_hash().decode()
        major, minor = divmod(handle.cpu_kernels_ffi_version(), 1000)
    except (OSError, AttributeError) as error:
        logger.info("%s is not usable: %s", path, error)
        return None
    if cpu_build.SOURCES.exists() and built_from != cpu_build.source_hash():
        logger.info("%s is older or newer than its sources", path)
        return None
    here_major, here_minor = _ffi_version()
    if major != here_major or minor > here_minor:
        logger.info(
            "%s speaks XLA FFI %d.%d, this jaxlib %d.%d", path, major, minor, *_ffi_version()
        )
        return None
    return path, handle


@functools.cache
def _ffi_version() -> tuple[int, int]:
    """Major and minor version of the FFI of the jaxlib that is installed."""
    text = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    numbers = [re.search(rf"define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    if None in numbers:
        raise CpuKernelsError("this jaxlib's headers do not tell the version of its FFI")
    major, minor = (int(number.group(1)) for number in numbers if number)
    return major, minor


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "jaxllm" / "cpu_kernels"


@functools.cache
def _cached_path() -> Path:
    """Where a library of these sources, this jaxlib and this compiler belongs."""
    compiler = cpu_build.find_compiler()
    facts = (
        cpu_build.source_hash(),
        jaxlib.__version__,
        platform.machine(),
        cpu_build.compiler_version(compiler) if compiler else "",
    )
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:24]
    return _cache_folder() / key / cpu_build.LIBRARY_NAME


@contextlib.contextmanager
def _build_lock() -> Iterator[None]:
    """Lets one process at a time build; the others find the result."""
    import fcntl

    folder = _cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
