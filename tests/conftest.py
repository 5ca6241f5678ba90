"""Settings every test needs before JAX is imported."""

import os
import sys
from pathlib import Path

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
