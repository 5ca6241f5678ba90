"""Compiled programs on disk, found without tracing the function they were made of.

JAX's own cache has the code of a program under a hash of its lowered form, so a start that
finds everything there still traces and lowers it all in Python. Here the first key is a hash of
what tracing would depend on. The second is one of the lowered form: when the sources have changed,
what they lower to often has not.
"""

import hashlib
import logging
import os
import re
import stat
import tempfile
import threading
from pathlib import Path

import jax

from jaxllm.execution import executable_bytes
from jaxllm.execution.cache_folder import CacheFolder, mark
from jaxllm.execution.compilation import compile_counts
from jaxllm.execution.program import Program

logger = logging.getLogger(__name__)

_ENTRY = re.compile(r"[0-9a-f]{64}\.(program|content)")
_PARTIAL = re.compile(r"\.new-.*|[0-9a-f]{64}\.\d+\.\d+")


class ProgramStore:
    """Programs in a folder that only this user can write to.

    Whatever is wrong with the folder or an entry, programs are compiled as they are without it.

    Args:
      folder: made if it is absent.
      sources: a hash of the sources that make the programs.
      platform: what else they depend on, `fingerprint`; any change hides all entries.
      max_bytes: what entries may take. When writing one makes it more, those that were used
        longest ago go, but none that this store has read or written.
    """

    def __init__(self, folder: Path, sources: str, platform: str, max_bytes: int):
        self._folder = folder
        self._entries = CacheFolder(
            folder,
            max_bytes,
            lambda name: _ENTRY.fullmatch(name) is not None,
            lambda name: _PARTIAL.fullmatch(name) is not None,
        )
        self._sources = sources
        self._platform = platform
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        self._usable = self._prepare()

    def compile(self, name: str, program: Program) -> jax.stages.Compiled:
        """The program from the folder, or compiled and then kept there.

        Args:
          name: of the program, with all that its function holds besides its arguments.
        """
        if not self._usable:
            return program.lower().compile()
        counts = compile_counts()
        path = self._folder / f"{self._key(name, program)}.program"
        compiled = self._read(path, program)
        if compiled is not None:
            counts.add(loaded=1)
            return compiled
        lowered = program.lower()
        content = self._folder / f"{self._content_key(program, lowered)}.content"
        compiled = self._read(content, program)
        if compiled is not None:
            counts.add(loaded=1)
            self._link(content, path)
            return compiled
        before = counts.compiled_here
        compiled = lowered.compile()
        # What JAX had on disk, or in memory from there, cannot be written (see executable_bytes).
        if counts.compiled_here > before and self._write(content, program, compiled):
            self._link(content, path)
        return compiled

    def _key(self, name: str, program: Program) -> str:
        return _digest(self._sources, self._platform, name, _signature(program))

    def _content_key(self, program: Program, lowered: jax.stages.Lowered) -> str:
        # The text shows neither the arguments that are not used nor which ones are.
        kept = repr(executable_bytes.kept_arguments(lowered))
        return _digest(self._platform, _signature(program), kept, lowered.as_text())

    def _prepare(self) -> bool:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            fault = writable_by_others(self._folder.lstat())
        except OSError as error:
            fault = str(error)
        if fault is not None:
            self._warn("compiled programs are not kept in %s: %s", self._folder, fault)
        return fault is None

    def _read(self, path: Path, program: Program) -> jax.stages.Compiled | None:
        self._entries.keep(path.name)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn("a kept program is not readable: %s", error)
            return None
        with os.fdopen(descriptor, "rb") as file:
            fault = writable_by_others(os.fstat(descriptor))
            if fault is not None:
                self._warn("%s is not used: %s", path, fault)
                return None
            mark(descriptor)
            data = file.read()
        try:
            return executable_bytes.from_bytes(program, data)
        # Another JAX may refuse in any way; the answer to all of them is to compile.
        except Exception as error:
            self._warn("%s is not usable and is made anew: %s", path, error)
            return None

    def _write(self, path: Path, program: Program, compiled: jax.stages.Compiled) -> bool:
        try:
            data = executable_bytes.to_bytes(program, compiled)
        except Exception as error:
            self._warn("programs are not kept: %s", error)
            return False
        temporary: str | None = None
        try:
            # Another process may read or write the same entry: it appears whole, by a rename.
            descriptor, temporary = tempfile.mkstemp(dir=self._folder, prefix=".new-")
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except OSError as error:
            self._warn("a program is not kept: %s", error)
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
            return False
        self._entries.wrote(len(data))
        return True

    def _link(self, content: Path, path: Path) -> None:
        """Makes `path` another name of `content`."""
        temporary = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        try:
            os.link(content, temporary)
            os.replace(temporary, path)
            # Where both were the same file already, the rename does nothing.
            temporary.unlink(missing_ok=True)
        except FileNotFoundError:
            # Another process has removed the entry since.
            return
        except OSError as error:
            self._warn("a program is not kept: %s", error)

    def _warn(self, message: str, *arguments: object) -> None:
        """Logs a kind of trouble once."""
        with self._lock:
            if message in self._warned:
                return
            self._warned.add(message)
        logger.warning(message, *arguments)


def _signature(program: Program) -> str:
    """How a program is called and what it gives."""
    flat, tree = jax.tree.flatten(program.arguments)
    arguments = [(x.shape, x.dtype.name, x.sharding.spec) for x in flat]
    places = [repr(x) for x in jax.tree.leaves(program.out_shardings)]
    return repr((program.donated, str(tree), arguments, places))


def _digest(*facts: str) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def writable_by_others(status: os.stat_result) -> str | None:
    """Why a file or folder may hold what others wrote, or None."""
    if not (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)):
        return "it is neither a file nor a folder"
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, not to {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):o})"
    return None
