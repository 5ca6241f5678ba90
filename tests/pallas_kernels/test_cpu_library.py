"""Building, finding and registering the CPU kernels."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from pallas_kernels import cpu_build, cpu_library

ROOT = Path(__file__).parents[2]
needs_kernels = pytest.mark.skipif(
    cpu_library.unavailable() is not None, reason="the CPU kernels are not available"
)


def run_python(code: str, **environment: str) -> dict[str, object]:
    """Run `code` in a process of its own; its last line of output, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@needs_kernels
def test_library_is_made_from_these_sources() -> None:
    library = cpu_library.load()
    assert library.path.name == cpu_build.LIBRARY_NAME
    assert library.instruction_set in cpu_build.INSTRUCTION_SETS
    assert cpu_library.load() is library


@needs_kernels
def test_kernel_objects_share_nothing_with_the_linker(tmp_path: Path) -> None:
    """Each instruction set's object defines one symbol of its own and no inline function that the
    linker could merge into the code of an older CPU.
    """
    compiler = cpu_build.find_compiler()
    if compiler is None or shutil.which("nm") is None:
        pytest.skip("needs a C++ compiler and nm")
    target = tmp_path / "isa.o"
    command = [compiler, *cpu_build.COMMON_FLAGS, "-O1", "-w", "-DISA_NS=isa_base"]
    subprocess.run(
        [*command, "-c", str(cpu_build.SOURCES / "isa.cc"), "-o", str(target)], check=True
    )
    lines = subprocess.run(["nm", str(target)], capture_output=True, text=True, check=True).stdout
    shared = [line for line in lines.splitlines() if line.split()[-2] in "TWVuD"]
    assert len(shared) == 1, shared
    assert "kernels" in shared[0]


@needs_kernels
def test_only_current_libraries_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu_library.open_current(tmp_path / "absent.so") is None
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    assert cpu_library.open_current(broken) is None
    path = cpu_library.load().path
    assert cpu_library.open_current(path) is not None
    monkeypatch.setattr(cpu_build, "source_hash", lambda: "of other sources")
    assert cpu_library.open_current(path) is None


def test_hash_follows_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(cpu_build.SOURCES, tmp_path / "csrc")
    monkeypatch.setattr(cpu_build, "SOURCES", tmp_path / "csrc")
    before = cpu_build.source_hash()
    header = tmp_path / "csrc" / "kernels.h"
    header.write_text(header.read_text() + "\n")
    assert cpu_build.source_hash() != before


def test_build_errors_say_what_the_compiler_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "csrc").mkdir()
    for name in ("handlers.cc", "isa.cc"):
        (tmp_path / "csrc" / name).write_text("this is not C++;\n")
    monkeypatch.setattr(cpu_build, "SOURCES", tmp_path / "csrc")
    if cpu_build.find_compiler() is not None:
        with pytest.raises(cpu_build.BuildError, match="this"):
            cpu_build.build(tmp_path / "x.so", jax.ffi.include_dir())
    monkeypatch.setattr(cpu_build, "find_compiler", lambda: None)
    with pytest.raises(cpu_build.BuildError, match="no C\\+\\+ compiler"):
        cpu_build.build(tmp_path / "x.so", jax.ffi.include_dir())
    assert not list(tmp_path.glob("*.so"))


def test_without_a_compiler_xla_serves_and_says_so_once(tmp_path: Path) -> None:
    code = """
import json, logging, sys
from pallas_kernels import cpu_build
from pathlib import Path
cpu_build.LIBRARY_NAME = "absent.so"
messages = []
class Keep(logging.Handler):
    def emit(self, record): messages.append(record.getMessage())
logging.getLogger("pallas_kernels").addHandler(Keep(level=logging.WARNING))
from pallas_kernels.linear import linear, select_impl
from pallas_kernels.paged_attention import select_impl as select_attention
import jax.numpy as jnp
names = [select_attention(), select_attention(), select_impl(), select_impl()]
total = float(linear(jnp.ones((2, 16)), jnp.ones((3, 16), jnp.bfloat16)).sum())
print(json.dumps({"names": names, "messages": messages, "total": total}))
"""
    result = run_python(
        code, PATH=str(tmp_path), CXX="", XDG_CACHE_HOME=str(tmp_path), JAXLLM_CPU_KERNELS=""
    )
    assert result["names"] == ["xla"] * 4
    assert result["total"] == 96
    messages = result["messages"]
    assert isinstance(messages, list)
    assert len(messages) == 1
    assert "no C++ compiler" in messages[0]


def test_ffi_mode_insists(tmp_path: Path) -> None:
    code = """
import json
from pallas_kernels import cpu_build
cpu_build.LIBRARY_NAME = "absent.so"
from pallas_kernels.linear import LinearError, select_impl
from pallas_kernels.paged_attention import UnsupportedError, select_impl as select_attention
errors = []
for select in (select_impl, select_attention):
    try: select()
    except (LinearError, UnsupportedError) as error: errors.append(str(error))
print(json.dumps({"errors": errors}))
"""
    result = run_python(
        code, PATH=str(tmp_path), CXX="", XDG_CACHE_HOME=str(tmp_path), JAXLLM_CPU_KERNELS="ffi"
    )
    errors = result["errors"]
    assert isinstance(errors, list)
    assert len(errors) == 2
    assert all("no C++ compiler" in error for error in errors)


@needs_kernels
def test_wrong_settings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu_library.ISA_VARIABLE, "sse9")
    with pytest.raises(cpu_library.CpuKernelsError, match="sse9"):
        cpu_library.isa_level()
    monkeypatch.setenv(cpu_library.MODE_VARIABLE, "maybe")
    with pytest.raises(cpu_library.CpuKernelsError, match="maybe"):
        cpu_library.unavailable()


CACHED_STEP = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_compilation_cache_dir", CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
from jax._src import monitoring
hits = []
monitoring.register_event_listener(lambda name, **_: hits.append(name))
from pallas_kernels.linear import linear
from pallas_kernels.paged_attention import attend_and_write
def step(pool, other, x, w):
    q = linear(x, w, impl="ffi").reshape(2, 2, 16)
    tables = jnp.array([[1], [2]], jnp.int32)
    ones, starts = jnp.ones(2, jnp.int32), jnp.arange(3, dtype=jnp.int32)
    slots = jnp.array([8, 16], jnp.int32)
    return attend_and_write(q, q, q, pool, other, tables, ones, starts, slots,
                            scale=0.25, kv_dtype=jnp.bfloat16, impl="cpu")
pools = [jnp.zeros((4, 2, 8, 16), jnp.uint16) for _ in range(2)]
x, w = jnp.linspace(-1, 1, 32).reshape(2, 16), jnp.ones((32, 16), jnp.bfloat16)
out, *_ = jax.jit(step, donate_argnums=(0, 1)).lower(*pools, x, w).compile()(*pools, x, w)
print(json.dumps({"out": np.asarray(out).ravel().tolist(),
                  "hit": "/jax/compilation_cache/cache_hits" in hits}))
"""


@needs_kernels
def test_persistent_compilation_cache_over_two_processes(tmp_path: Path) -> None:
    code = CACHED_STEP.replace("CACHE", repr(str(tmp_path)))
    first, second = run_python(code), run_python(code)
    assert not first["hit"]
    assert second["hit"]
    assert first["out"] == second["out"]
    assert any(first["out"])  # type: ignore[call-overload]


@needs_kernels
def test_serialised_executables_run_in_another_process(tmp_path: Path) -> None:
    """An ahead-of-time executable names the kernels; the process that loads it registers them."""
    common = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import serialize_executable as se
x, w = jnp.linspace(-1, 1, 48).reshape(3, 16), jnp.linspace(0, 1, 80).reshape(5, 16)
"""
    write = f"""{common}
from pallas_kernels.linear import linear
compiled = jax.jit(lambda x, w: linear(x, w, impl="ffi")).lower(x, w).compile()
blob, _, _ = se.serialize(compiled)
open({str(tmp_path / "blob")!r}, "wb").write(blob)
print(json.dumps({{"out": np.asarray(compiled(x, w)).tolist()}}))
"""
    read = f"""{common}
from pallas_kernels import cpu_library
cpu_library.load()
blob = open({str(tmp_path / "blob")!r}, "rb").read()
_, in_tree = jax.tree.flatten(((x, w), {{}}))
loaded = se.deserialize_and_load(blob, in_tree, jax.tree.structure(0))
print(json.dumps({{"out": np.asarray(loaded(x, w)).tolist()}}))
"""
    assert run_python(write)["out"] == run_python(read)["out"]
