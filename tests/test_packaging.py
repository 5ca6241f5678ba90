"""What an installation without the working tree must contain."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Made on the machine, or by the build itself.
MADE = {".py", ".pyc", ".so"}


@pytest.mark.parametrize("package", ["jaxllm", "pallas_kernels", "serving"])
def test_every_data_file_of_a_package_is_installed_with_it(package: str) -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"].get(package, [])
    folder = ROOT / package
    shipped = {path for pattern in patterns for path in folder.glob(pattern)}
    present = {path for path in folder.rglob("*") if path.is_file() and path.suffix not in MADE}
    assert present == shipped


def test_extras_name_each_other_rightly() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    for needs in extras.values():
        for need in needs:
            if need.startswith("jaxllm["):
                inner = need.removeprefix("jaxllm[").removesuffix("]").split(",")
                assert set(inner) <= set(extras)
