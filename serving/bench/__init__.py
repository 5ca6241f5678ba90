"""Load tests and timings: `jaxllm bench serve | throughput | latency | startup | sweep`."""
