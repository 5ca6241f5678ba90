"""Builds the C++ CPU kernels into the package where a C++ compiler and XLA's headers are at hand.

Everything else about the package is in pyproject.toml. Where the library cannot be built here, the
package does without: pallas_kernels.cpu_library compiles it at first use, or XLA serves.
"""

import importlib.util
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

PACKAGE = "pallas_kernels"


def load_builder() -> ModuleType:
    """pallas_kernels/cpu_build.py by its path: the package is not installed yet."""
    path = Path(__file__).parent / PACKAGE / "cpu_build.py"
    spec = importlib.util.spec_from_file_location("cpu_build", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ffi_headers() -> Path | None:
    """Folder of XLA's FFI headers, which come with jaxlib; None without jaxlib."""
    found = importlib.util.find_spec("jaxlib")
    if found is None or found.origin is None:
        return None
    return Path(found.origin).parent / "include"


class BuildKernels(build_ext):
    """Compiles the library as the package's one extension; not being able to is no error."""

    def get_ext_filename(self, fullname: str) -> str:
        # A plain shared library, loaded by ctypes: no Python version in its name.
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        builder = load_builder()
        headers = ffi_headers()
        if headers is None:
            self.warn("no jaxlib in the build environment: the CPU kernels are built at first use")
            return
        try:
            builder.build(Path(self.get_ext_fullpath(ext.name)), str(headers))
        except builder.BuildError as error:
            self.warn(f"the CPU kernels were not built: {error}")


class PlatformWheel(bdist_wheel):
    """The library depends on the platform but on no Python ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


setup(
    ext_modules=[Extension(f"{PACKAGE}._cpu_kernels", sources=[], optional=True)],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
    package_data={
        PACKAGE: ["csrc/*.h", "csrc/*.cc"],
        "serving.http": ["*.html"],
        "serving.grpc": ["*.proto", "*.binpb"],
    },
)
