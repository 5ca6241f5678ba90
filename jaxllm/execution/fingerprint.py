"""What can change a compiled program besides its definition, as hashes: sources, and the rest."""

import functools
import hashlib
import os
import platform
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import flax
import jax
import jaxlib
import ml_dtypes
import numpy as np
from jax._src import config as jax_config

_SOURCES = (".py", ".cc", ".h")
_VARIABLES = re.compile(r"(XLA|JAX|JAXLLM_CPU|LLVM|TF_XLA|PJRT)_")
# They say where compiled programs lie and how many, not what they are.
_PLACES = (
    "JAX_COMPILATION_CACHE_DIR",
    "jax_compilation_cache_dir",
    "JAX_COMPILATION_CACHE_MAX_SIZE",
    "jax_compilation_cache_max_size",
)
_CPU_FACTS = re.compile(r"^(?:model name|flags|Features|CPU part)\s*:.*$", re.MULTILINE)
_IMPORTED = time.time()


def fingerprint(devices: Sequence[jax.Device]) -> str:
    """A hash (hexadecimal) of versions, machine, devices, JAX's settings and the environment.

    Args:
      devices: what programs run on.
    """
    client = devices[0].client
    settings = {k: v for k, v in jax.config.values.items() if k not in _PLACES}
    variables = {k: v for k, v in os.environ.items() if _VARIABLES.match(k) and k not in _PLACES}
    facts = (
        [module.__version__ for module in (jax, jaxlib, flax, np, ml_dtypes)],
        platform.python_version(),
        platform.machine(),
        _cpu_facts(),
        # XLA cuts loops of CPU programs into as many parts as there are threads.
        os.cpu_count(),
        usable_cores(),
        [(d.platform, d.device_kind, d.id, d.process_index) for d in devices],
        (len(client.devices()), client.platform, client.platform_version),
        sorted((key, repr(value)) for key, value in settings.items()),
        without_addresses(repr(jax_config.trace_context())),
        sorted(variables.items()),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def hash_sources(package: Path) -> str:
    """Hash of the names and contents of all Python and C++ sources below a folder."""
    digest = hashlib.sha256()
    for path in _sources(package):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(package)} {content}\n".encode())
    return digest.hexdigest()


def changed_since_start(packages: Iterable[Path]) -> bool:
    """Whether a source was written after this process began, so that the process may run what was
    there before."""
    began = _process_start()
    return any(path.stat().st_mtime >= began for p in packages for path in _sources(p))


def without_addresses(text: str) -> str:
    """A repr in which functions are known by their names alone."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def usable_cores() -> int:
    """CPU cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _sources(package: Path) -> list[Path]:
    return sorted(path for path in package.rglob("*") if path.suffix in _SOURCES)


@functools.cache
def _cpu_facts() -> tuple[str, ...]:
    """Model and instruction sets, which XLA compiles for."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return (platform.processor(),)
    return tuple(sorted(set(_CPU_FACTS.findall(text))))


@functools.cache
def _process_start() -> float:
    """Seconds since the epoch."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _IMPORTED
    return time.time() - uptime + ticks
