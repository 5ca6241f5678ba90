"""The command `jaxllm plan`."""

import argparse
from typing import Any

from jaxllm.config import parse_length
from jaxllm.planning.arguments import add_machine, plan_from, tokens


def add_plan_command(
    subparsers: "argparse._SubParsersAction[Any]",
    parents: list[argparse.ArgumentParser] | None = None,
) -> None:
    """Adds `plan`, which sizes a deployment; its `run` returns the exit code."""
    parser = subparsers.add_parser(
        "plan",
        parents=parents or [],
        help="what fits a device, and which settings to use",
        description="What fits a device: weights, KV cache, requests, settings with reasons, and "
        "speed at most. Needs the model's config.json, not its weights, and no device. Exit code "
        "1: not one request fits.",
    )
    add_machine(parser)
    parser.add_argument(
        "--max-num-seqs", type=int, metavar="N", help="requests at once, instead of the advice"
    )
    parser.add_argument(
        "--max-num-batched-tokens", type=int, metavar="N", help="tokens of a step, likewise"
    )
    parser.add_argument(
        "--max-logprobs",
        type=int,
        default=20,
        metavar="N",
        help="the engine's; -1 allows the whole vocabulary, which takes memory (default: 20)",
    )
    parser.add_argument(
        "--mean-context",
        type=parse_length,
        metavar="LEN",
        help="tokens a running request holds on average, for --max-num-seqs (default: 2048)",
    )
    parser.add_argument(
        "--target-itl-ms",
        type=float,
        default=50.0,
        metavar="MS",
        help="time between two tokens that decoding should keep (default: 50)",
    )
    parser.add_argument(
        "--max-step-ms",
        type=float,
        default=250.0,
        metavar="MS",
        help="time a step of prompt tokens may take (default: 250)",
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="know a step's memory by compiling it for the GPU, without one; takes a minute "
        "(default: where JAX's CUDA plugin is installed)",
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    parser.set_defaults(run=run_plan)


def run_plan(arguments: argparse.Namespace) -> int:
    """Prints a plan; 1 where not one request fits."""
    from jaxllm.planning.render import render_json, render_table

    found = plan_from(
        arguments,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_logprobs=arguments.max_logprobs,
        mean_context=tokens(arguments.mean_context, "--mean-context"),
        target_itl=arguments.target_itl_ms / 1e3,
        max_step_time=arguments.max_step_ms / 1e3,
        compile_step=arguments.compile,
    )
    print(render_json(found) if arguments.json else render_table(found))
    return 0 if found.fits else 1
