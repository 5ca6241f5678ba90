"""The command `jaxllm simulate`."""

import argparse
import itertools
import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.errors import ConfigError
from jaxllm.planning.arguments import add_machine, plan_from
from jaxllm.planning.router import ROUTERS

if TYPE_CHECKING:
    from jaxllm.planning.plan import Plan
    from jaxllm.planning.simulate import SimulationConfig
    from jaxllm.planning.step_time import StepTimeModel
    from jaxllm.planning.trace import TraceRequest

logger = logging.getLogger(__name__)

# Requests from which on the start of further processes pays.
WORTH_PROCESSES = 20_000


def add_simulate_command(
    subparsers: "argparse._SubParsersAction[Any]",
    parents: list[argparse.ArgumentParser] | None = None,
) -> None:
    """Adds `simulate`, which runs traffic on paper; its `run` returns the exit code."""
    parser = subparsers.add_parser(
        "simulate",
        parents=parents or [],
        help="latency and throughput of traffic, without a device",
        description="Runs a trace through the engine's scheduler and block pool on a virtual "
        "clock: time to first token, time between tokens, throughput, preemptions and KV use. "
        "Lists of --max-num-seqs, --max-num-batched-tokens, --num-blocks, --replicas and --router "
        "are combined, one row each.",
    )
    add_machine(parser)
    clock = parser.add_argument_group("step time")
    clock.add_argument(
        "--samples",
        type=Path,
        metavar="FILE",
        help="JSON of measured steps to fit; unset: the roofline of --gpu",
    )
    clock.add_argument(
        "--attained-compute",
        type=float,
        default=0.6,
        metavar="X",
        help="share of the GPU's peak arithmetic that steps attain (default: 0.6)",
    )
    clock.add_argument(
        "--attained-bandwidth",
        type=float,
        default=0.75,
        metavar="X",
        help="share of its peak bandwidth (default: 0.75)",
    )
    clock.add_argument(
        "--step-overhead-ms",
        type=float,
        default=0.5,
        metavar="MS",
        help="fixed cost of a step beside the roofline (default: 0.5)",
    )
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="JSONL of {arrival, prompt_tokens, output_tokens[, prefix, prefix_tokens]}",
    )
    traffic.add_argument(
        "--num-requests", type=int, default=1000, metavar="N", help="default: 1000"
    )
    traffic.add_argument(
        "--rate", type=float, default=1.0, metavar="X", help="requests per second; 0: all at once"
    )
    traffic.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="X",
        help="1: Poisson arrivals; less: in bursts (default: 1)",
    )
    for name, default in (("prompt", "512"), ("output", "128")):
        traffic.add_argument(
            f"--{name}-tokens",
            default=default,
            metavar="LEN",
            help=f"512, 64:255 (uniform) or 300~0.8 (lognormal) (default: {default})",
        )
    traffic.add_argument(
        "--prefix-groups", type=int, default=0, metavar="N", help="shared prefixes (default: 0)"
    )
    traffic.add_argument(
        "--prefix-tokens", type=int, default=0, metavar="N", help="length of each, added to prompts"
    )
    traffic.add_argument("--seed", type=int, default=0, help="of the traffic (default: 0)")
    engine = parser.add_argument_group("engine and deployment")
    engine.add_argument(
        "--max-num-seqs", type=_integers, metavar="N[,N]", help="default: the plan's advice"
    )
    engine.add_argument(
        "--max-num-batched-tokens", type=_integers, metavar="N[,N]", help="likewise"
    )
    engine.add_argument(
        "--num-blocks", type=_integers, metavar="N[,N]", help="default: what the plan says fits"
    )
    engine.add_argument("--replicas", type=_integers, default=[1], metavar="N[,N]", help="1 to 64")
    engine.add_argument(
        "--router",
        type=_names,
        default=["round-robin"],
        metavar="NAME[,NAME]",
        help=f"one or more of {', '.join(ROUTERS)} (default: round-robin)",
    )
    engine.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="share KV blocks of equal prefixes (default: on)",
    )
    engine.add_argument(
        "--long-prefill-token-threshold",
        type=int,
        default=0,
        metavar="N",
        help="most prompt tokens of one request in a step while others wait; 0: no limit",
    )
    engine.add_argument(
        "--scheduling-policy", choices=("fcfs", "priority"), default="fcfs", help="default: fcfs"
    )
    engine.add_argument(
        "--async-scheduling",
        action="store_true",
        help="plan a step while the one before it runs; the simulation takes longer",
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    parser.add_argument(
        "--processes",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="that share the replicas of a round-robin router (default: one per core)",
    )
    parser.add_argument(
        "--plots", type=Path, metavar="FOLDER", help="write plots there (needs matplotlib)"
    )
    parser.set_defaults(run=run_simulate)


def run_simulate(arguments: argparse.Namespace) -> int:
    """Prints a row per setting."""
    from jaxllm.planning.report import render_results
    from jaxllm.planning.simulate import simulate

    sizes = plan_from(arguments, compile_step=False)
    trace = _trace(arguments, sizes.max_model_len)
    model = _step_time(arguments, sizes)
    processes = arguments.processes if len(trace) >= WORTH_PROCESSES else 1
    results = []
    for label, config in _settings(arguments, sizes):
        logger.info("simulating %d requests: %s", len(trace), label)
        result = simulate(trace, config, model, processes)
        logger.info("done in %.1f s", result.wall_seconds)
        results.append((label, result))
    if arguments.json:
        rows = [{"setting": label} | result.as_dict() for label, result in results]
        print(json.dumps(rows, indent=2))
    else:
        print(render_results(results))
    if arguments.plots is not None:
        from jaxllm.planning.plots import write_plots

        for path in write_plots(results, arguments.plots):
            logger.info("wrote %s", path)
    return 0


def _trace(arguments: argparse.Namespace, max_model_len: int) -> "list[TraceRequest]":
    from jaxllm.planning.trace import Lengths, Traffic, read_trace

    if arguments.trace is not None:
        return read_trace(arguments.trace)
    most_prompt = max(max_model_len - arguments.prefix_tokens - 1, 1)
    traffic = Traffic(
        num_requests=arguments.num_requests,
        rate=arguments.rate,
        prompt=Lengths.parse(arguments.prompt_tokens),
        output=Lengths.parse(arguments.output_tokens),
        burstiness=arguments.burstiness,
        prefix_groups=arguments.prefix_groups,
        prefix_tokens=arguments.prefix_tokens,
        seed=arguments.seed,
        most_prompt=most_prompt,
        most_output=max_model_len,
    )
    return list(traffic.requests())


def _step_time(arguments: argparse.Namespace, sizes: "Plan") -> "StepTimeModel":
    from jaxllm.planning.step_time import fit_step_time, read_samples

    if arguments.samples is not None:
        fit = fit_step_time(*read_samples(arguments.samples))
        logger.info(
            "step time fitted to %d steps: mean error %.1f %%, total %+.1f %%",
            fit.num_samples,
            100 * fit.mean_error,
            100 * fit.total_error,
        )
        return fit.model
    if sizes.roofline is None:
        raise ConfigError("give --samples, or a --gpu of the table whose roofline is known")
    for flag, value in (
        ("--attained-compute", arguments.attained_compute),
        ("--attained-bandwidth", arguments.attained_bandwidth),
    ):
        if not 0 < value <= 1:
            raise ConfigError(f"{flag} {value}: above 0, at most 1")
    if arguments.step_overhead_ms < 0:
        raise ConfigError(f"--step-overhead-ms {arguments.step_overhead_ms}: at least 0")
    return sizes.roofline.attained(
        arguments.attained_compute, arguments.attained_bandwidth, arguments.step_overhead_ms / 1e3
    )


def _settings(arguments: argparse.Namespace, sizes: "Plan") -> "list[tuple[str, SimulationConfig]]":
    """Every combination of the listed knobs, labelled by those that vary."""
    from jaxllm.engine.scheduler import SchedulerConfig
    from jaxllm.planning.simulate import SimulationConfig

    choices: dict[str, list[Any]] = {
        "max_num_seqs": arguments.max_num_seqs or [int(sizes.knob("max_num_seqs").value)],
        "max_num_batched_tokens": arguments.max_num_batched_tokens
        or [int(sizes.knob("max_num_batched_tokens").value)],
        "num_blocks": arguments.num_blocks or [sizes.num_blocks],
        "replicas": arguments.replicas,
        "router": arguments.router,
    }
    varying = [name for name, values in choices.items() if len(values) > 1]
    settings = []
    for combination in itertools.product(*choices.values()):
        chosen = dict(zip(choices, combination, strict=True))
        scheduler = SchedulerConfig(
            max_num_seqs=chosen["max_num_seqs"],
            max_num_batched_tokens=chosen["max_num_batched_tokens"],
            max_model_len=sizes.max_model_len,
            block_size=sizes.block_size,
            long_prefill_token_threshold=arguments.long_prefill_token_threshold,
            policy=arguments.scheduling_policy,
        )
        config = SimulationConfig(
            scheduler,
            num_blocks=chosen["num_blocks"],
            num_replicas=chosen["replicas"],
            router=chosen["router"],
            enable_prefix_caching=arguments.enable_prefix_caching,
            async_scheduling=arguments.async_scheduling,
        )
        label = ", ".join(f"{name}={chosen[name]}" for name in varying) or "as planned"
        settings.append((label, config))
    return settings


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in ROUTERS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(ROUTERS)}")
    return names
