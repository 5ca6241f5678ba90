"""Settings every test needs before JAX is imported."""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tensor-parallel tests need several devices; the fake ones share the cores.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

# The compiler for GPUs (`make install-test`), which tests use without a GPU.
AOT = Path(__file__).parent.parent / ".aot"
if AOT.is_dir():
    sys.path.append(str(AOT))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        part for part in (os.environ.get("PYTHONPATH"), str(AOT)) if part
    )

# The files that take longest, the longest first (CPU seconds on two cores with AVX2: 200 to 20). A
# worker takes a whole file at a time; one of these taken last would leave the other workers idle.
LONGEST = (
    "pallas_kernels/test_aot.py",
    "pallas_kernels/test_grid.py",
    "test_smollm2.py",
    "notebooks/test_notebooks.py",
    "execution/test_step.py",
    "test_fuzz.py",
    "test_batch_invariance.py",
    "serving/bench/test_commands.py",
    "models/test_llama.py",
    "execution/test_sampler.py",
    "test_llm.py",
    "serving/test_tracing.py",
    "serving/test_lifecycle.py",
    "test_weights.py",
    "planning/test_activation.py",
    "serving/test_grpc_weights.py",
    "serving/test_sleep.py",
)
_ORDER = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}


def pytest_configure(config: pytest.Config) -> None:
    # pytest-xdist would begin with the files that have most tests: those with few, long ones last.
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _ORDER.get(item.path, len(_ORDER)))


@pytest.fixture(autouse=True)
def log_levels() -> Iterator[None]:
    """The command line sets the level of these loggers for its process: here, for one test."""
    loggers = [logging.getLogger(name) for name in ("jaxllm", "serving", "pallas_kernels")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
