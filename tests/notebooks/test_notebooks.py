"""Every notebook runs from top to bottom, headless, in a kernel of its own.

They run on a tiny model, since the real one takes minutes. `JAXLLM_NOTEBOOK_MODEL=smollm2` runs
them as they are kept.
"""

import base64
import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TINY = ROOT / "tests/golden/data/tiny_chat"
MAX_PLOT_BYTES = 200_000

pytestmark = pytest.mark.slow


def test_there_are_six():
    assert [path.name[0] for path in NOTEBOOKS] == list("123456")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, monkeypatch):
    monkeypatch.setenv("JAXLLM_NOTEBOOK_MODEL", os.environ.get("JAXLLM_NOTEBOOK_MODEL", str(TINY)))
    # Fake devices of the tests would share the cores.
    monkeypatch.setenv("XLA_FLAGS", "")
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": path.parent}}
    )
    client.execute()
    assert plots(notebook)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_kept_was_run_and_is_small(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert plots(notebook)
    assert all(len(plot) < MAX_PLOT_BYTES for plot in plots(notebook))
    text = path.read_text()
    assert str(ROOT) not in text and str(Path.home()) + "/" not in text


def plots(notebook):
    """PNG bytes of all figures."""
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    found = [o["data"]["image/png"] for o in outputs if "image/png" in o.get("data", {})]
    return [base64.b64decode(png) for png in found]
