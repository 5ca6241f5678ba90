"""The subcommand `jaxllm bench`. A benchmark is imported when it is chosen, its flags with it."""

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

_BENCHMARKS = {
    "serve": "load on a running server",
    "throughput": "tokens per second of the engine, offline",
    "latency": "seconds per batch of the engine, offline",
    "startup": "from start to first token, cold and warm",
    "sweep": "throughput and latency over token budgets and concurrencies",
}


class _LateParser(argparse.ArgumentParser):
    """A parser that gets its arguments when it is first used."""

    module: str | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.module is not None:
            name, self.module = self.module, None
            try:
                benchmark = importlib.import_module(name)
            except ImportError as error:
                self.error(f"this needs the packages of jaxllm[bench]: {error}")
            benchmark.add_arguments(self)
            self.set_defaults(run=benchmark.run)
        return super().parse_known_args(args, namespace)


def add_bench_command(commands: Any, parents: Sequence[argparse.ArgumentParser] = ()) -> None:
    """Adds `bench` to the subparsers of a command line; `run(arguments)` gives the exit code."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="measure servers and engines",
        description="Measure servers and engines; results have the field names of vLLM's.",
    )
    benchmarks = parser.add_subparsers(required=True, metavar="BENCHMARK", parser_class=_LateParser)
    for name, text in _BENCHMARKS.items():
        options: dict[str, Any] = {"parents": parents, "help": text}
        benchmark = benchmarks.add_parser(name, description=f"Measure {text}.", **options)
        benchmark.module = f"serving.bench.{name}_command"
