"""Attention and matrix kernels for GPUs and CPUs. Imports nothing of jaxllm."""
