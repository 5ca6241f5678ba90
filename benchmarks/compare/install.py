"""What an installation weighs and how long an import takes.

    python -m benchmarks.compare.install --peers PEERS --out results

Installs jaxllm from the working tree (with the server's packages, without those of the tests) into
a fresh environment, and compares it with the peers' environments: megabytes on disk, number of
distributions, and the wall time of `import NAME` in a fresh interpreter (median of several, the
first one left out, engines in turns).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


def size_mb(folder: Path) -> float:
    """Megabytes (10^6 bytes) of the regular files under a folder."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files) / 1e6


def import_seconds(python: Path, module: str) -> float:
    """Wall time of an interpreter that imports a module and ends."""
    begin = time.perf_counter()
    subprocess.run([python, "-c", f"import {module}"], check=True, capture_output=True)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path, required=True, help="where setup_peers.sh built")
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        own = Path(scratch) / "jaxllm"
        subprocess.run([sys.executable, "-m", "venv", own], check=True)
        subprocess.run(
            [
                *(own / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check"),
                *("-c", ROOT / "constraints.txt", f"{ROOT}[serve]"),
            ],
            check=True,
        )
        environments = {
            "jaxllm": (own, "jaxllm"),
            "vllm": (args.peers.resolve() / "vllm", "vllm"),
            "llama-cpp": (args.peers.resolve() / "llama-cpp", "llama_cpp"),
            "transformers": (args.peers.resolve() / "torch", "transformers, torch"),
        }
        seconds: dict[str, list[float]] = {name: [] for name in environments}
        for _ in range(args.repeats + 1):
            for name, (folder, module) in environments.items():
                seconds[name].append(import_seconds(folder / "bin" / "python", module))
        rows: list[dict[str, Any]] = []
        for name, (folder, module) in environments.items():
            rows.append(
                {
                    "engine": name,
                    "megabytes": round(size_mb(folder)),
                    "distributions": len(
                        list(folder.glob("lib/python*/site-packages/*.dist-info"))
                    ),
                    "imports": module,
                    "import_s": round(statistics.median(seconds[name][1:]), 2),
                }
            )
    (args.out / "install.json").write_text(json.dumps(rows, indent=1) + "\n")
    lines = ["| engine | MB | distributions | imports | s |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['engine']} | {row['megabytes']} | {row['distributions']} | {row['imports']} "
        f"| {row['import_s']} |"
        for row in rows
    ]
    (args.out / "install.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
