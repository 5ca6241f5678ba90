"""The store of compiled programs: equal results without tracing, and what it must not take."""

import functools
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm import LLM, SamplingParams, startup
from jaxllm.config import EngineConfig
from jaxllm.execution import executable_bytes, program_store
from jaxllm.execution.compilation import compile_counts, enable_persistent_cache
from jaxllm.execution.fingerprint import fingerprint, hash_sources, without_addresses
from jaxllm.execution.mesh import make_mesh
from jaxllm.execution.program import Program
from jaxllm.execution.program_store import ProgramStore
from pallas_kernels import cpu_library
from pallas_kernels.linear import linear

ROWS, COLUMNS = 8, 16


class Counted:
    """A function that counts how often it is traced: donates x, does not use `unused`."""

    def __init__(self):
        self.traces = 0

    def __call__(self, weights, x, unused):
        self.traces += 1
        y = x + weights["a"] @ weights["b"]
        return y, [jnp.sum(x, axis=0), (jnp.argmax(y, axis=1),)]


@pytest.fixture(autouse=True)
def without_the_cache_of_jax():
    """What it has must not be kept, and other tests turn it on."""
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()


def program(function, num_devices: int = 1, rows: int = ROWS) -> Program:
    mesh = make_mesh(num_devices)
    whole = NamedSharding(mesh, PartitionSpec())
    cut = NamedSharding(mesh, PartitionSpec(None, "tensor"))
    abstract = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    weights = {
        "a": abstract((rows, 4), sharding=whole),
        "b": abstract((4, COLUMNS), sharding=cut),
    }
    x = abstract((rows, COLUMNS), sharding=cut)
    unused = abstract((3,), sharding=whole)
    return Program(function, (weights, x, unused), (cut, [whole, whole]), donated=(1,))


def run(compiled: jax.stages.Compiled, of: Program) -> tuple[list[np.ndarray], jax.Array]:
    """Results for fixed numbers, and the donated argument."""
    rng = np.random.default_rng(0)
    weights, x, unused = jax.tree.map(
        lambda a: jax.device_put(rng.standard_normal(a.shape, np.float32), a.sharding),
        of.arguments,
    )
    results = compiled(weights, x, unused)
    assert jax.tree.structure(results) == jax.tree.structure((0, [0, (0,)]))
    assert results[0].sharding == x.sharding
    return [np.asarray(result) for result in jax.tree.leaves(results)], x


def open_store(
    folder: Path, sources: str = "sources", platform: str = "platform", max_bytes: int = 2**30
) -> ProgramStore:
    return ProgramStore(folder, sources, platform, max_bytes)


def entry(folder: Path) -> Path:
    [path] = folder.glob("*.program")
    return path


@pytest.mark.parametrize("num_devices", [1, 4])
def test_a_program_comes_back_untraced_and_gives_the_same_bits(num_devices, tmp_path):
    function = Counted()
    of = program(function, num_devices)
    expected, _ = run(open_store(tmp_path).compile("p", of), of)
    assert function.traces == 1
    jax.clear_caches()
    counts = compile_counts()
    before = (counts.requested, counts.loaded)
    compiled = open_store(tmp_path).compile("p", of)
    assert function.traces == 1
    assert (counts.requested, counts.loaded) == (before[0], before[1] + 1)
    for _ in range(3):
        results, donated = run(compiled, of)
        assert donated.is_deleted()
        for result, wanted in zip(results, expected, strict=True):
            np.testing.assert_array_equal(result, wanted)
    assert compiled.memory_analysis().alias_size_in_bytes > 0
    assert [info.donated for info in jax.tree.leaves(compiled.args_info)] == [0, 0, 1, 0]


def test_it_refuses_other_arguments_as_before(tmp_path):
    of = program(Counted())
    for _ in range(2):
        compiled = open_store(tmp_path).compile("p", of)
        with pytest.raises(TypeError):
            run(compiled, program(Counted(), rows=ROWS + 1))


@pytest.mark.skipif(cpu_library.unavailable() is not None, reason="no C++ kernels")
def test_a_call_of_a_kernel_is_found_again(tmp_path):
    whole = NamedSharding(make_mesh(1), PartitionSpec())
    arguments = tuple(
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=whole) for shape in [(4, 64), (32, 64)]
    )
    of = Program(functools.partial(linear, impl="ffi"), arguments, whole)
    x, w = (jax.device_put(jnp.ones(a.shape, a.dtype) * 0.5, whole) for a in arguments)
    first, second = (open_store(tmp_path).compile("p", of)(x, w) for _ in range(2))
    assert compile_counts().loaded > 0
    np.testing.assert_array_equal(first, second)
    assert float(second[0, 0]) == 16.0


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: b"jaxllm program 0\n" + data[17:],
        lambda data: data + b"x",
    ],
    ids=["empty", "cut", "flipped", "format", "longer"],
)
def test_a_damaged_entry_is_made_anew(damage, tmp_path, caplog):
    function = Counted()
    of = program(function)
    expected, _ = run(open_store(tmp_path).compile("p", of), of)
    whole = entry(tmp_path).read_bytes()
    entry(tmp_path).write_bytes(damage(whole))
    store = open_store(tmp_path)
    jax.clear_caches()
    results, _ = run(store.compile("p", of), of)
    np.testing.assert_array_equal(results[0], expected[0])
    assert function.traces == 2
    assert caplog.text.count("is not usable and is made anew") == 1
    assert executable_bytes.from_bytes(of, entry(tmp_path).read_bytes())
    open_store(tmp_path).compile("p", of)
    assert function.traces == 2


def test_trouble_is_told_once(tmp_path, caplog):
    of = program(Counted())
    store = open_store(tmp_path)
    for name in "ab":
        store.compile(name, of)
    for path in tmp_path.glob("*.program"):
        path.write_bytes(b"nothing")
    for name in "ab":
        store.compile(name, of)
    assert caplog.text.count("is not usable") == 1


def test_facts_name_and_shapes_are_told_apart(tmp_path):
    function = Counted()
    before = compile_counts().requested
    for platform, name, rows in [("f", "p", 8), ("g", "p", 8), ("f", "q", 8), ("f", "p", 9)]:
        jax.clear_caches()
        open_store(tmp_path, platform=platform).compile(name, program(function, rows=rows))
    assert function.traces == 4
    assert len(list(tmp_path.glob("*.program"))) == 4
    # The function does not depend on its name.
    assert compile_counts().requested - before == 3


def test_new_sources_are_traced_but_not_compiled_if_they_lower_to_the_same(tmp_path):
    function = Counted()
    of = program(function)
    expected, _ = run(open_store(tmp_path, "old").compile("p", of), of)
    for traces in (2, 2):
        jax.clear_caches()
        before = compile_counts().requested
        compiled = open_store(tmp_path, "new").compile("p", of)
        assert compile_counts().requested == before
        np.testing.assert_array_equal(run(compiled, of)[0][0], expected[0])
        assert function.traces == traces


def test_what_the_cache_of_jax_had_is_not_kept(tmp_path):
    enable_persistent_cache(tmp_path / "jax")
    compilation_cache.reset_cache()
    of = program(Counted())
    counts = compile_counts()
    hits = counts.cache_hits
    of.lower().compile()
    jax.clear_caches()
    store = open_store(tmp_path / "store")
    run(store.compile("p", of), of)
    assert counts.cache_hits == hits + 1
    assert not list((tmp_path / "store").iterdir())


def test_what_jax_has_in_memory_from_its_cache_is_not_kept(tmp_path):
    """JAX answers a second request for the same function from memory, without an event."""
    enable_persistent_cache(tmp_path / "jax")
    compilation_cache.reset_cache()
    of = program(Counted())
    of.lower().compile()
    jax.clear_caches()
    of.lower().compile()
    store = open_store(tmp_path / "store")
    run(store.compile("p", of), of)
    assert not list((tmp_path / "store").iterdir())


@pytest.mark.parametrize("other", ["uses another", "has more"])
def test_programs_of_one_text_with_other_arguments_are_told_apart(other, tmp_path):
    whole = NamedSharding(make_mesh(1), PartitionSpec())
    shape = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=whole)
    store = open_store(tmp_path)
    first = Program(lambda a, b: 2 * a, (shape, shape), whole)
    if other == "uses another":
        second, wanted = Program(lambda a, b: 2 * b, (shape, shape), whole), 1
    else:
        second, wanted = Program(lambda a, b, c: 2 * c, (shape, shape, shape), whole), 2
    assert first.lower().as_text() == second.lower().as_text()
    store.compile("first", first)
    compiled = store.compile("second", second)
    values = [jax.device_put(jnp.full(4, i, jnp.float32), whole) for i in range(3)]
    result = compiled(*values[: len(second.arguments)])
    np.testing.assert_array_equal(result, np.full(4, 2 * wanted))


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path, caplog):
    tmp_path.chmod(0o777)
    function = Counted()
    of = program(function)
    for _ in range(2):
        jax.clear_caches()
        run(open_store(tmp_path).compile("p", of), of)
    assert function.traces == 2
    assert not list(tmp_path.iterdir())
    assert "others may write to it (mode 777)" in caplog.text


def test_a_file_that_others_can_write_to_is_not_used(tmp_path, caplog):
    function = Counted()
    of = program(function)
    open_store(tmp_path).compile("p", of)
    entry(tmp_path).chmod(0o666)
    jax.clear_caches()
    open_store(tmp_path).compile("p", of)
    assert function.traces == 2
    assert "others may write to it" in caplog.text
    assert entry(tmp_path).stat().st_mode & 0o022 == 0


def test_files_and_folders_of_other_users_are_not_used(tmp_path):
    status = list(tmp_path.stat())
    assert program_store.writable_by_others(os.stat_result(status)) is None
    status[4] += 1
    assert "belongs to user" in program_store.writable_by_others(os.stat_result(status))


def test_a_link_in_place_of_a_folder_or_file_is_not_followed(tmp_path):
    real = tmp_path / "real"
    open_store(real).compile("p", program(Counted()))
    link = tmp_path / "link"
    link.symlink_to(real)
    function = Counted()
    open_store(link).compile("p", program(function))
    assert function.traces == 1
    moved = entry(real).rename(tmp_path / "moved")
    (real / f"{program_key(real)}.program").symlink_to(moved)
    jax.clear_caches()
    open_store(real).compile("p", program(function))
    assert function.traces == 2


def program_key(folder: Path) -> str:
    return open_store(folder)._key("p", program(Counted()))


def test_a_folder_that_cannot_be_made_does_not_stop_a_start(tmp_path, caplog):
    (tmp_path / "file").touch()
    of = program(Counted())
    run(open_store(tmp_path / "file" / "below").compile("p", of), of)
    assert "are not kept" in caplog.text


def test_stores_that_write_at_once_leave_one_whole_entry(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    of = program(Counted())
    stores = [open_store(tmp_path) for _ in range(6)]
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda store: store.compile("p", of), stores))
    assert {path.suffix for path in tmp_path.iterdir()} == {".program", ".content"}
    assert executable_bytes.from_bytes(of, entry(tmp_path).read_bytes())


def age_all(folder: Path, seconds: float) -> None:
    for path in folder.iterdir():
        used = path.stat().st_mtime - seconds
        os.utime(path, (used, used))


def test_what_was_used_longest_ago_goes_but_nothing_of_this_start(tmp_path):
    function = Counted()
    read, unused, written = (program(function, rows=rows) for rows in (8, 9, 10))
    for of in (read, unused):
        open_store(tmp_path).compile("p", of)
        age_all(tmp_path, 1000)
    store = open_store(tmp_path, max_bytes=1)
    store.compile("p", read)
    assert len(list(tmp_path.iterdir())) == 4
    for _ in range(2):
        store.compile("p", written)
        assert len(list(tmp_path.iterdir())) == 4
    jax.clear_caches()
    traces = function.traces
    for of in (read, written, unused):
        open_store(tmp_path).compile("p", of)
    assert function.traces == traces + 1


def test_reading_an_entry_keeps_it_for_later_starts(tmp_path):
    function = Counted()
    first, second, third = (program(function, rows=rows) for rows in (8, 9, 10))
    for of in (first, second):
        open_store(tmp_path).compile("p", of)
        age_all(tmp_path, 1000)
    open_store(tmp_path).compile("p", first)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.program"))
    open_store(tmp_path, max_bytes=int(1.2 * size)).compile("p", third)
    jax.clear_caches()
    traces = function.traces
    for of in (first, third):
        open_store(tmp_path).compile("p", of)
    assert function.traces == traces
    open_store(tmp_path).compile("p", second)
    assert function.traces == traces + 1


def test_an_entry_that_another_process_removes_is_compiled(tmp_path, caplog, monkeypatch):
    function = Counted()
    of = program(function)
    store = open_store(tmp_path)
    expected, _ = run(store.compile("p", of), of)
    write = store._write

    def write_and_lose(path, *arguments):
        write(path, *arguments)
        path.unlink()
        return True

    monkeypatch.setattr(store, "_write", write_and_lose)
    for path in tmp_path.iterdir():
        path.unlink()
    jax.clear_caches()
    results, _ = run(store.compile("p", of), of)
    np.testing.assert_array_equal(results[0], expected[0])
    assert function.traces == 2
    assert not list(tmp_path.iterdir())
    assert not caplog.records


def test_what_a_killed_writer_left_goes(tmp_path):
    for name in (".new-abc", f"{'0' * 64}.12.345"):
        (tmp_path / name).write_bytes(b"part")
    age_all(tmp_path, 2 * 3600)
    (tmp_path / ".new-def").write_bytes(b"being written")
    open_store(tmp_path).compile("p", program(Counted()))
    assert {path.suffix or path.name for path in tmp_path.iterdir()} == {
        ".program", ".content", ".new-def",
    }  # fmt: skip


def test_a_program_with_a_callback_is_not_kept(tmp_path, caplog):
    def function(weights, x, unused):
        jax.debug.callback(lambda value: None, x[0, 0])
        return x, [x[0], (x[0],)]

    of = program(function)
    run(open_store(tmp_path).compile("p", of), of)
    assert not list(tmp_path.iterdir())
    assert "programs are not kept" in caplog.text


def test_the_fingerprint_follows_versions_settings_and_environment(monkeypatch):
    devices = jax.devices()[:1]
    seen = {fingerprint(devices)}
    assert fingerprint(devices) in seen

    def changed() -> None:
        found = fingerprint(devices)
        assert found not in seen
        seen.add(found)

    for variable in ("XLA_FLAGS", "JAXLLM_CPU_ISA"):
        monkeypatch.setenv(variable, "--another=1")
        changed()
    monkeypatch.setattr(np, "__version__", "0.0")
    changed()
    with jax.default_matmul_precision("highest"):
        changed()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_MAX_SIZE", "5")
    assert fingerprint(devices) in seen
    monkeypatch.setattr(os, "cpu_count", lambda: 97)
    changed()
    assert fingerprint(jax.devices()[:2]) not in seen


def test_the_hash_of_sources_follows_names_and_contents_of_code(tmp_path):
    (tmp_path / "below").mkdir()
    seen = set()
    for name, content in [("a.py", "1"), ("below/b.cc", "2"), ("a.py", "2"), ("below/b.cc", "1")]:
        (tmp_path / name).write_text(content)
        seen.add(hash_sources(tmp_path))
    assert len(seen) == 4
    (tmp_path / "notes.md").write_text("3")
    assert hash_sources(tmp_path) in seen


def test_functions_are_described_by_name():
    text = without_addresses(repr([functools.partial(linear, impl="ffi")]))
    assert text == "[functools.partial(<function linear>, impl='ffi')]"


def old_program_of_jax(folder: Path) -> Path:
    """2 MiB, written a day ago."""
    path = folder / "jit_f-0-cache"
    path.write_bytes(bytes(2**21))
    used = path.stat().st_mtime - 86400
    os.utime(path, (used, used))
    return path


def test_a_folder_that_the_environment_names_keeps_programs_of_others(tmp_path, monkeypatch):
    old = old_program_of_jax(tmp_path)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    startup._cut_cache(EngineConfig(compilation_cache_max_size="1MiB"), tmp_path, 60)
    assert old.exists()
    own = EngineConfig(compilation_cache_dir=str(tmp_path), compilation_cache_max_size="1MiB")
    startup._cut_cache(own, tmp_path, 60)
    assert not old.exists()


def test_a_model_starts_again_without_tracing(tmp_path):
    model = str(Path(__file__).parent.parent / "golden/data/qwen3")
    settings = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "kv_cache_memory": "1MiB",
        "compilation_cache_dir": str(tmp_path),
        "compilation_cache_max_size": "1MiB",
    }
    old = old_program_of_jax(tmp_path)
    params = [SamplingParams(temperature=t, top_p=0.9, max_tokens=4, seed=3) for t in (0, 1)]
    prompts = [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [4, 5]}]

    def outputs() -> tuple[list[list[int]], LLM]:
        llm = LLM(model, progress=False, **settings)
        found = llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in found], llm

    first, _ = outputs()
    assert not old.exists()
    jax.clear_caches()
    compilation_cache.reset_cache()
    loaded = compile_counts().loaded
    second, llm = outputs()
    assert second == first
    programs = llm._engine.runner.programs
    assert compile_counts().loaded - loaded == len(programs.items()) > 2
