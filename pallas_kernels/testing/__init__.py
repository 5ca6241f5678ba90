"""What tests, benchmarks and reports of the kernels share: batches, interpreters, compiles without
a device.
"""
