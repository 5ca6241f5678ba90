"""What can be known before a device is asked: KV arithmetic, the planner, the simulator."""

from jaxllm.planning.arithmetic import full_length_requests, kv_bytes_per_token, kv_token_budget

__all__ = ["full_length_requests", "kv_bytes_per_token", "kv_token_budget"]
