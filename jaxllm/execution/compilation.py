"""Ahead-of-time compilation: the persistent cache, the threads, and a count of what compiled."""

import dataclasses
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from jaxllm.execution.cache_folder import CacheFolder

logger = logging.getLogger(__name__)

CACHE_DIR_VARIABLE = "JAX_COMPILATION_CACHE_DIR"

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"


@dataclasses.dataclass(slots=True)
class CompileCounts:
    """Programs since the process began.

    Attributes:
      requested: handed to the backend.
      cache_hits: how many of those JAX's cache had.
      loaded: read from a `ProgramStore`, so that nothing was handed to the backend.
    """

    requested: int = 0
    cache_hits: int = 0
    loaded: int = 0
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock, repr=False)
    _here: threading.local = dataclasses.field(default_factory=threading.local, repr=False)

    @property
    def compiled(self) -> int:
        return self.requested - self.cache_hits

    @property
    def cached(self) -> int:
        """Programs that were on disk, as code or whole."""
        return self.cache_hits + self.loaded

    def add(self, requested: int = 0, cache_hits: int = 0, loaded: int = 0) -> None:
        """Counts more; threads may call it at once."""
        with self._lock:
            self.requested += requested
            self.cache_hits += cache_hits
            self.loaded += loaded
        self._here.compiled = self.compiled_here + requested - cache_hits

    @property
    def compiled_here(self) -> int:
        """compiled by the calling thread; JAX compiles in the thread that asks for it."""
        return getattr(self._here, "compiled", 0)


@functools.cache
def compile_counts() -> CompileCounts:
    """The process's counter; counting starts with the first call."""
    counts = CompileCounts()

    def on_duration(event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == _COMPILE_EVENT:
            counts.add(requested=1)

    def on_event(event: str, **kwargs: Any) -> None:
        if event == _CACHE_HIT_EVENT:
            counts.add(cache_hits=1)

    jax.monitoring.register_event_duration_secs_listener(on_duration)
    jax.monitoring.register_event_listener(on_event)
    return counts


def default_cache_dir() -> Path:
    """JAX_COMPILATION_CACHE_DIR, or a folder under the user's cache directory."""
    chosen = os.environ.get(CACHE_DIR_VARIABLE)
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxllm" / "compiled"


def enable_persistent_cache(directory: Path) -> None:
    """Makes JAX keep every compiled program in `directory`, whatever its size or compile time."""
    directory.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def cut_persistent_cache(directory: Path, max_bytes: int, keep_seconds: float) -> None:
    """Removes the programs in JAX's cache that were used longest ago, down to max_bytes; those used
    in the last keep_seconds stay.

    JAX can do so itself (`jax_compilation_cache_max_size`), but then lists the folder and reads a
    file per entry at each write, half a second where there are 3000. Where that is set, nothing
    is done here.
    """
    if jax.config.jax_compilation_cache_max_size == -1:
        folder = CacheFolder(directory, max_bytes, lambda name: name.endswith("-cache"))
        folder.cut(keep_since=time.time() - keep_seconds)


def compile_all(
    jobs: Iterable[tuple[Any, Callable[[], jax.stages.Compiled]]], progress: bool
) -> dict[Any, jax.stages.Compiled]:
    """Runs compile jobs in threads; returns key -> executable, and logs time and cache hits."""
    jobs = list(jobs)
    counts = compile_counts()
    compiled, cached = counts.compiled, counts.cached
    began = time.monotonic()
    with ThreadPoolExecutor(max_workers=max(2, (os.cpu_count() or 2))) as threads:
        futures = {key: threads.submit(job) for key, job in jobs}
        bar = tqdm(total=len(jobs), desc="compiling", unit="program", disable=not progress)
        programs = {}
        for key, future in futures.items():
            programs[key] = future.result()
            bar.update()
        bar.close()
    logger.info(
        "%d programs ready in %.1f s: %d compiled, %d from the cache",
        len(jobs),
        time.monotonic() - began,
        counts.compiled - compiled,
        counts.cached - cached,
    )
    return programs
