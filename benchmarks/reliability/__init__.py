"""Scripts that measure how the server behaves under load, abuse and faults."""
