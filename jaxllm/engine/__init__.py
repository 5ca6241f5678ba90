"""Token side: requests, block pool, prefix cache, scheduler, core. Python and numpy; no JAX."""
