"""jaxllm: an LLM inference engine for JAX."""

from typing import TYPE_CHECKING, Any

from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from jaxllm.llm import LLM

__all__ = ["LLM", "RequestOutputKind", "SamplingParams", "StructuredOutputs"]


def __getattr__(name: str) -> Any:
    # Importing JAX takes a second; `jaxllm --help` and the token side do without.
    if name == "LLM":
        from jaxllm.llm import LLM

        return LLM
    raise AttributeError(f"module 'jaxllm' has no attribute {name!r}")
