"""jaxllm: an LLM inference engine for JAX."""
