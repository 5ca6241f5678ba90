"""The subcommands `jaxllm serve` and `jaxllm diagnose`."""

import argparse
import asyncio
import logging
import sys
import time
from typing import Any

from jaxllm import config as engine_settings
from serving.http import settings as server_settings


def add_serve_command(
    commands: Any, parents: tuple[argparse.ArgumentParser, ...] = ()
) -> argparse.ArgumentParser:
    """Adds `serve` to the subparsers of a command line; `run(arguments)` gives the exit code."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        parents=list(parents),
        help="serve a model over HTTP",
        description="Serve a model over HTTP, compatible with OpenAI's API.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        default=argparse.SUPPRESS,
        help="folder, hub id, .gguf file, Orbax folder, or 'smollm2' (the default)",
    )
    server_settings.add_arguments(parser.add_argument_group("server"))
    engine_settings.add_arguments(parser.add_argument_group("engine"), skip=frozenset({"model"}))
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Serves until a signal; the exit code tells why it ended (docs/serving.md)."""
    from serving.http.server import HttpServer

    quiet = getattr(arguments, "quiet", False)
    verbose = getattr(arguments, "verbose", False)
    level = logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO
    logging.getLogger("serving").setLevel(level)
    engine_config = engine_settings.from_arguments(arguments)
    server_config = server_settings.from_arguments(arguments)

    async def serve() -> int:
        server = HttpServer(
            engine_config, server_config, progress=sys.stderr.isatty() and not quiet
        )
        return await server.run(_announce)

    return asyncio.run(serve())


def _announce(url: str) -> None:
    print(f"jaxllm: listening at {url} (the model is loading)", file=sys.stderr, flush=True)


def add_diagnose_command(
    commands: Any, parents: tuple[argparse.ArgumentParser, ...] = ()
) -> argparse.ArgumentParser:
    """Adds `diagnose` to the subparsers of a command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "diagnose",
        parents=list(parents),
        help="tell which trouble a running server has",
        description="Watch a running server and tell which of the known troubles it has.",
    )
    parser.add_argument("url", help="of the server, such as http://localhost:8000")
    parser.add_argument("--seconds", type=float, default=10.0, help="to watch (default: 10)")
    parser.add_argument(
        "--queue-target", type=float, default=1.0, help="seconds in the queue that are fine"
    )
    parser.set_defaults(run=run_diagnose)
    return parser


def run_diagnose(arguments: argparse.Namespace) -> int:
    """Prints the findings; 0 if there are none, 1 for trouble, 2 without an answer."""
    from serving.diagnose import Diagnosis, fetch
    from serving.errors import ServingError

    try:
        before = fetch(arguments.url)
        time.sleep(max(0.0, arguments.seconds))
        after = fetch(arguments.url)
    except ServingError as error:
        print(f"jaxllm: error: {error}", file=sys.stderr)
        return 2
    findings = Diagnosis(before, after, arguments.queue_target).findings()
    for finding in findings:
        print(f"{finding.name}\n  {finding.evidence}\n  -> {finding.advice}")
    if not findings:
        print(f"no known trouble in {arguments.seconds:g} s")
    return int(bool(findings))


def main(argv: list[str] | None = None) -> int:
    """`python -m serving.commands serve ...`."""
    parser = argparse.ArgumentParser(prog="jaxllm")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("-v", "--verbose", action="store_true", help="debug log")
    common.add_argument("-q", "--quiet", action="store_true", help="warnings only")
    commands = parser.add_subparsers(required=True)
    add_serve_command(commands, (common,))
    add_diagnose_command(commands, (common,))
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        return int(arguments.run(arguments))
    except (ValueError, OSError) as error:
        print(f"jaxllm: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
