"""What may not enter the sources: code made of data, and integers without bounds in requests."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PRODUCT = sorted(
    path
    for folder in ("jaxllm", "serving", "pallas_kernels")
    for path in (ROOT / folder).rglob("*.py")
)
# Modules that make objects or code of bytes, and the one whose checkpoints do.
MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle", "torch"}
CALLS = {"eval", "exec", "compile", "__import__"}
# Whatever answers requests must not fetch what they name.
FETCHERS = {"requests", "httpx", "aiohttp", "urllib3", "ftplib", "http", "urllib"}
ANSWERING = sorted(
    path
    for folder in ("http", "tools", "engine")
    for path in (ROOT / "serving" / folder).rglob("*.py")
)
BODIES = [ROOT / "serving/http/protocol.py", ROOT / "serving/http/admin.py"]


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, node.module or ""


def faults(source: str) -> list[str]:
    """The lines of a source that make code or objects of data."""
    tree = ast.parse(source)
    found = [f"{line}: {name}" for line, name in imports(tree) if name.split(".")[0] in MODULES]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in CALLS:
            found.append(f"{node.lineno}: {node.func.id}()")
        name = ast.unparse(node.func)
        if name in ("os.system", "os.popen", "yaml.load"):
            found.append(f"{node.lineno}: {name}()")
        for keyword in node.keywords:
            on = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
            if on and keyword.arg in ("allow_pickle", "shell", "trust_remote_code"):
                found.append(f"{node.lineno}: {keyword.arg}=True")
    return found


def unbounded(source: str) -> list[str]:
    """Fields of message types that are plain integers."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.bases:
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and any(
                    isinstance(part, ast.Name) and part.id == "int"
                    for part in ast.walk(field.annotation)
                ):
                    found.append(f"{field.lineno}: {ast.unparse(field)}")
    return found


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_code_comes_from_data(path):
    assert faults(path.read_text(encoding="utf-8")) == []


def test_every_integer_of_a_request_is_bounded():
    for path in BODIES:
        assert unbounded(path.read_text(encoding="utf-8")) == [], path


def test_nothing_that_answers_requests_fetches():
    for path in ANSWERING:
        found = [name for _, name in imports(ast.parse(path.read_text(encoding="utf-8")))]
        assert not [name for name in found if name.split(".")[0] in FETCHERS], path


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "import torch.nn as nn",
        "eval('1')",
        "exec(text)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(text, shell=True)",
        "AutoTokenizer.from_pretrained(path, trust_remote_code=True)",
        "os.system(text)",
    ],
)
def test_the_rules_find(source):
    assert faults(source)


def test_the_rule_for_integers_finds():
    assert unbounded("class Body(msgspec.Struct):\n    n: int | None = None")
    assert unbounded("class Body(SamplingFields):\n    ids: list[int]")
    assert not unbounded("class Body(msgspec.Struct):\n    n: Int32 | None = None")
