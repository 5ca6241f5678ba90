"""A folder of cache files that is cut when it grows."""

import os
import time
from pathlib import Path

import jax

from jaxllm.execution import cache_folder
from jaxllm.execution.cache_folder import CacheFolder, mark
from jaxllm.execution.compilation import cut_persistent_cache

NOW = time.time()


def put(folder: Path, name: str, size: int = 100, age: float = 0) -> Path:
    """A file last used `age` seconds ago."""
    path = folder / name
    path.write_bytes(b"x" * size)
    os.utime(path, (NOW - age, NOW - age))
    return path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def limited(folder: Path, max_bytes: int) -> CacheFolder:
    return CacheFolder(
        folder,
        max_bytes,
        lambda name: name.endswith(".entry"),
        lambda name: name.endswith(".part"),
    )


def test_what_was_used_longest_ago_goes_and_nothing_where_there_is_room(tmp_path):
    for age, name in enumerate("abcdefghij"):
        put(tmp_path, f"{name}.entry", age=age)
    limited(tmp_path, 1000).cut()
    assert len(names(tmp_path)) == 10
    limited(tmp_path, 800).cut()
    # To nine tenths.
    assert names(tmp_path) == {f"{name}.entry" for name in "abcdefg"}


def test_reading_counts_as_use_by_either_time(tmp_path):
    old = put(tmp_path, "old.entry", age=900)
    put(tmp_path, "middle.entry", age=500)
    accessed = put(tmp_path, "accessed.entry", age=800)
    os.utime(accessed, (NOW, NOW - 800))
    with old.open("rb") as file:
        mark(file.fileno())
    limited(tmp_path, 250).cut()
    assert names(tmp_path) == {"old.entry", "accessed.entry"}


def test_names_of_one_file_count_once_and_go_together(tmp_path):
    for age, name in enumerate(["new", "old"]):
        first = put(tmp_path, f"{name}.entry", age=age)
        os.link(first, tmp_path / f"{name}2.entry")
    limited(tmp_path, 200).cut()
    assert len(names(tmp_path)) == 4
    limited(tmp_path, 199).cut()
    assert names(tmp_path) == {"new.entry", "new2.entry"}


def test_what_is_kept_stays_by_any_of_its_names(tmp_path):
    first = put(tmp_path, "kept.entry", age=900)
    os.link(first, tmp_path / "other.entry")
    put(tmp_path, "new.entry")
    folder = limited(tmp_path, 1)
    folder.keep("kept.entry")
    folder.cut()
    assert names(tmp_path) == {"kept.entry", "other.entry"}


def test_what_was_used_since_a_time_stays(tmp_path):
    for age, name in [(10, "new"), (30, "old")]:
        put(tmp_path, f"{name}.entry", age=age)
    limited(tmp_path, 1).cut(keep_since=NOW - 20)
    assert names(tmp_path) == {"new.entry"}


def test_the_folder_is_listed_at_the_first_write_and_then_when_it_may_be_full(
    tmp_path, monkeypatch
):
    listings = []
    scandir = os.scandir
    monkeypatch.setattr(
        cache_folder.os, "scandir", lambda path: listings.append(path) or scandir(path)
    )
    put(tmp_path, "before.entry", 500, age=900)
    folder = limited(tmp_path, 1000)
    seen = []
    for i in range(6):
        folder.keep(f"{i}.entry")
        put(tmp_path, f"{i}.entry")
        folder.wrote(100)
        seen.append(len(listings))
    assert seen == [1, 1, 1, 1, 1, 2]
    assert names(tmp_path) == {f"{i}.entry" for i in range(6)}


def test_old_partial_files_go_and_other_names_are_left_alone(tmp_path):
    put(tmp_path, "killed.part", age=cache_folder.PARTIAL_SECONDS + 10)
    put(tmp_path, "alive.part", age=10)
    put(tmp_path, "notes.txt", size=5000, age=10**6)
    (tmp_path / "folder.entry").mkdir()
    (tmp_path / "link.entry").symlink_to(tmp_path / "notes.txt")
    limited(tmp_path, 1).cut()
    assert names(tmp_path) == {"alive.part", "notes.txt", "folder.entry", "link.entry"}


def test_files_that_vanish_are_no_trouble(tmp_path, monkeypatch):
    for age in range(5):
        put(tmp_path, f"{age}.entry", age=age)
    stat, unlink = os.stat, Path.unlink

    def stat_after_another_cut(path, **options):
        if Path(path).name == "3.entry":
            unlink(Path(path))
        return stat(path, **options)

    def unlink_after_another_cut(path, missing_ok=False):
        unlink(path)
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(cache_folder.os, "stat", stat_after_another_cut)
        patch.setattr(Path, "unlink", unlink_after_another_cut)
        limited(tmp_path, 300).cut()
    assert names(tmp_path) == {"0.entry", "1.entry"}
    limited(tmp_path / "absent", 1).cut()


def test_the_cache_of_jax_is_cut_unless_jax_does_it(tmp_path):
    for age, name in [(10, "new"), (10**5, "middle"), (10**6, "old")]:
        put(tmp_path, f"jit_f-{name}-cache", age=age)
    put(tmp_path, "other", age=2 * 10**6)
    jax.config.update("jax_compilation_cache_max_size", 150)
    try:
        cut_persistent_cache(tmp_path, 1, keep_seconds=50_000)
    finally:
        jax.config.update("jax_compilation_cache_max_size", -1)
    assert len(names(tmp_path)) == 4
    cut_persistent_cache(tmp_path, 250, keep_seconds=50_000)
    assert names(tmp_path) == {"jit_f-new-cache", "jit_f-middle-cache", "other"}
    cut_persistent_cache(tmp_path, 1, keep_seconds=50_000)
    assert names(tmp_path) == {"jit_f-new-cache", "other"}


def test_marking_what_cannot_be_marked_is_no_error(tmp_path):
    descriptor = os.open(tmp_path, os.O_RDONLY)
    os.close(descriptor)
    mark(descriptor)
