"""The version that servers report."""

from importlib import metadata


def _find() -> str:
    try:
        return metadata.version("jaxllm")
    except metadata.PackageNotFoundError:
        return "0.0.0"


VERSION = _find()
