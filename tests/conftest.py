"""Settings every test needs before JAX is imported."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tensor-parallel tests need several devices; the fake ones share the cores.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
