"""Who may import whom: serving -> jaxllm -> pallas_kernels, and inside jaxllm as below."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Package -> the parts of jaxllm it may import. Modules at the top of jaxllm that hold plain data
# may be imported by all.
PLAIN = {"errors", "sampling_params", "structured_outputs", "outputs", "config"}
ALLOWED = {
    "engine": set(),
    "text": set(),
    "models": set(),
    "checkpoints": {"text"},
    "execution": {"engine", "models"},
    "planning": {"engine", "execution", "models", "checkpoints", "llm", "sizing", "startup"},
}
MAY_IMPORT_JAX = {"execution", "models", "checkpoints"}
# A program that the planner runs in a process of its own to compile step programs: the process has
# JAX so that the planner needs none. In return nothing may import it.
JAX_PROCESSES = {Path("jaxllm/planning/device_compile.py")}
MODULES = sorted(p.relative_to(ROOT) for p in ROOT.glob("jaxllm/*/**/*.py"))


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_a_package_imports_only_what_lies_below_it(path):
    package = path.parts[1]
    allowed = ALLOWED[package] | {package} | PLAIN
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "jaxllm" and len(parts) > 1 and parts[1] != "__version__":
            assert parts[1] in allowed, f"{path} imports {name}"
        assert parts[0] != "serving", f"{path} imports {name}"
        if parts[0] in ("jax", "jaxlib", "flax", "importlib"):
            may = package in MAY_IMPORT_JAX or path in JAX_PROCESSES
            assert may or name.startswith("importlib.metadata"), f"{path} imports {name}"


def test_nothing_imports_a_program_that_has_jax_to_itself():
    names = {".".join(path.with_suffix("").parts) for path in JAX_PROCESSES}
    for package in ("jaxllm", "serving"):
        for path in ROOT.glob(f"{package}/**/*.py"):
            assert not imported(path.relative_to(ROOT)) & names, path


def test_kernels_import_nothing_of_jaxllm():
    for path in ROOT.glob("pallas_kernels/**/*.py"):
        roots = {name.split(".")[0] for name in imported(path.relative_to(ROOT))}
        assert not roots & {"jaxllm", "serving"}, path


def test_no_torch_and_no_pickle_anywhere_in_the_product():
    for package in ("jaxllm", "pallas_kernels", "serving"):
        for path in ROOT.glob(f"{package}/**/*.py"):
            roots = {name.split(".")[0] for name in imported(path.relative_to(ROOT))}
            assert not roots & {"torch", "pickle", "dill", "cloudpickle"}, path


def test_the_token_side_runs_without_jax():
    import subprocess
    import sys

    code = (
        "import sys; import jaxllm.engine.core, jaxllm.text.tokenizer; "
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
