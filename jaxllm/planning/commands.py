"""The commands `jaxllm plan` and `jaxllm simulate`, for the command line to add."""

from jaxllm.planning.plan_command import add_plan_command, run_plan
from jaxllm.planning.simulate_command import add_simulate_command, run_simulate

__all__ = ["add_plan_command", "add_simulate_command", "run_plan", "run_simulate"]
