"""What tests, benchmarks and reports of the kernels share."""
