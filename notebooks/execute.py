"""Runs notebooks from top to bottom and keeps what they print and plot.

    python notebooks/execute.py 4        # only the fourth
    python notebooks/execute.py          # all six

Prints the seconds of each. Nothing else should run: the plots hold measurements.
"""

import argparse
import os
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent


def execute(path: Path) -> float:
    """Runs one notebook in a kernel of its own and writes its outputs back; seconds."""
    notebook = nbformat.read(path, as_version=4)
    metadata = dict(notebook.metadata)
    began = time.perf_counter()
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": path.parent}}
    ).execute()
    seconds = time.perf_counter() - began
    for cell in notebook.cells:
        # When each cell ran: different every time, of no use to a reader.
        cell.metadata.pop("execution", None)
    # The kernel's exact version would differ from machine to machine.
    notebook.metadata = metadata
    nbformat.write(notebook, path)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("numbers", nargs="*", choices=list("123456"), metavar="N", help="1 to 6")
    numbers = parser.parse_args().numbers or list("123456")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for path in sorted(FOLDER.glob("*.ipynb")):
        if path.name[0] in numbers:
            print(f"{path.name}: {execute(path):.1f} s", flush=True)


if __name__ == "__main__":
    main()
