"""Compiles csrc/ into one shared library: an object per instruction set, and the XLA handlers.

Standard library only: the package's build loads this file by its path, where no package is
installed yet, and `cpu_library` uses it at run time.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
LIBRARY_NAME = "_cpu_kernels.so"

# In the order of the levels in handlers.cc. F16C comes with every CPU that has AVX2.
INSTRUCTION_SETS: dict[str, tuple[str, ...]] = {
    "base": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    "avx512bf16": ("-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512"),
}
# Contraction is off because equal bits on different paths depend on what is fused; fast-math stays
# off because masks are infinities and exp rounds by adding a large constant.
COMMON_FLAGS = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off")
# Copies of a few vectors stay vectors: a call of memmove costs more than they do.
KERNEL_FLAGS = (
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-tree-loop-distribute-patterns",
    "-w",
)
HANDLER_FLAGS = ("-O2", "-w")


class BuildError(RuntimeError):
    """The CPU kernels could not be compiled; the message has the compiler's last lines."""


def find_compiler() -> str | None:
    """Path of a C++ compiler: $CXX, c++, g++ or clang++; None where there is none."""
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


def compiler_version(compiler: str) -> str:
    """The first line of what the compiler says of itself."""
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0]


def source_hash() -> str:
    """Hash of the sources and flags: equal where the library would be the same."""
    digest = hashlib.sha256()
    for path in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cc")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((INSTRUCTION_SETS, COMMON_FLAGS, KERNEL_FLAGS, HANDLER_FLAGS)).encode())
    return digest.hexdigest()[:32]


def instruction_sets() -> dict[str, tuple[str, ...]]:
    """The instruction sets to build for on this machine's architecture, with their flags."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        return INSTRUCTION_SETS
    return {"base": ()}


def build(target: Path, include_dir: str, *, compiler: str | None = None) -> None:
    """Compile the library and put it at `target`, in one step that no reader sees half done.

    include_dir: that of `jax.ffi.include_dir()`, for XLA's FFI headers. Takes some 40 s on two
    cores. Raises BuildError without a compiler or where it fails.
    """
    compiler = compiler or find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler found (tried $CXX, c++, g++, clang++)")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as scratch:
        folder = Path(scratch)
        handlers = folder / "handlers.o"
        definition = f'-DSOURCE_HASH="{source_hash()}"'
        flags = (*HANDLER_FLAGS, f"-I{include_dir}", definition)
        commands = [_compile(compiler, "handlers.cc", handlers, flags)]
        objects = [handlers]
        for name, isa_flags in instruction_sets().items():
            objects.append(folder / f"{name}.o")
            kernel_flags = (*KERNEL_FLAGS, *isa_flags, f"-DISA_NS=isa_{name}")
            commands.append(_compile(compiler, "isa.cc", objects[-1], kernel_flags))
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        linked = folder / LIBRARY_NAME
        _run([compiler, "-shared", *map(str, objects), "-o", str(linked)])
        linked.replace(target)


def _compile(compiler: str, source: str, target: Path, flags: Sequence[str]) -> list[str]:
    return [compiler, *COMMON_FLAGS, *flags, "-c", str(SOURCES / source), "-o", str(target)]


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}: {done.stderr[-2000:]}")
