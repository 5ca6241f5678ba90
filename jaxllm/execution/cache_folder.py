"""Folders of files that are cut when they grow: what was used longest ago goes first."""

import contextlib
import dataclasses
import logging
import math
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

# Of a writer that was killed; a live one takes seconds.
PARTIAL_SECONDS = 3600
# Cutting somewhat below the size leaves room for many writes before the folder is listed again.
CUT_TO = 0.9


@dataclasses.dataclass(slots=True)
class _File:
    """A file under all of its names: bytes, and when it was used last (ns since the epoch)."""

    size: int
    used: int
    names: list[str] = dataclasses.field(default_factory=list)


class CacheFolder:
    """A folder that holds at most so many bytes, shared with other processes.

    Any file may vanish at any time: others cut the folder too. A file's last use is the later of
    its times of access and of change; not every file system notes an access, so `mark` sets both.

    Args:
      max_bytes: of entries; names of one file count once.
      is_entry: which names are entries.
      is_partial: which names are unfinished entries; they go once they are an hour old. Other
        names are left alone.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        is_entry: Callable[[str], bool],
        is_partial: Callable[[str], bool] = lambda name: False,
    ):
        self._folder = folder
        self._max_bytes = max_bytes
        self._is_entry = is_entry
        self._is_partial = is_partial
        self._kept: set[str] = set()
        self._num_bytes: int | None = None
        self._lock = threading.Lock()

    def keep(self, name: str) -> None:
        """This object will not remove the entry `name`, which need not be there yet."""
        with self._lock:
            self._kept.add(name)

    def wrote(self, num_bytes: int) -> None:
        """Cuts the folder if what was written lately may have made it too large."""
        with self._lock:
            if self._num_bytes is None or self._num_bytes + num_bytes > self._max_bytes:
                self._num_bytes = self._cut()
            else:
                self._num_bytes += num_bytes

    def cut(self, keep_since: float = math.inf) -> None:
        """Removes the entries used longest ago if there are more than max_bytes.

        Args:
          keep_since: those used from then on stay (seconds since the epoch).
        """
        with self._lock:
            self._num_bytes = self._cut(keep_since)

    def _cut(self, keep_since: float = math.inf) -> int:
        """Bytes of the entries left. Holds the lock while it removes, so that `keep` holds."""
        files = sorted(self._list(), key=lambda file: (file.used, file.names))
        before = left = sum(file.size for file in files)
        if left <= self._max_bytes:
            return left
        for file in files:
            if left <= CUT_TO * self._max_bytes or file.used >= keep_since * 1e9:
                break
            if self._kept.isdisjoint(file.names) and all(map(self._remove, file.names)):
                left -= file.size
        if left < before:
            logger.info(
                "%s held %.0f MiB, of which %.0f that were used longest ago are removed",
                self._folder, before / 2**20, (before - left) / 2**20,
            )  # fmt: skip
        return left

    def _list(self) -> list[_File]:
        """The entries, after old partial files are removed."""
        files: dict[tuple[int, int], _File] = {}
        too_old = (time.time() - PARTIAL_SECONDS) * 1e9
        with contextlib.suppress(OSError), os.scandir(self._folder) as found:
            for item in found:
                entry, partial = self._is_entry(item.name), self._is_partial(item.name)
                if not (entry or partial):
                    continue
                try:
                    # The status that a listing brings may lack the file's number.
                    status = os.stat(item.path, follow_symlinks=False)
                except OSError:
                    continue
                if not stat.S_ISREG(status.st_mode):
                    continue
                used = max(status.st_atime_ns, status.st_mtime_ns)
                if entry:
                    number = status.st_dev, status.st_ino
                    file = files.setdefault(number, _File(status.st_size, used))
                    file.names.append(item.name)
                elif used < too_old:
                    self._remove(item.name)
        return list(files.values())

    def _remove(self, name: str) -> bool:
        try:
            (self._folder / name).unlink(missing_ok=True)
        except OSError:
            return False
        return True


def mark(descriptor: int) -> None:
    """Notes that an open file was used now; without effect where that may not be written."""
    with contextlib.suppress(OSError):
        os.utime(descriptor)
