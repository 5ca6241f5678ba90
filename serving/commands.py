"""The subcommand `jaxllm serve`."""

import argparse
import asyncio
import logging
import sys
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


def main(argv: list[str] | None = None) -> int:
    """`python -m serving.commands serve ...`."""
    parser = argparse.ArgumentParser(prog="jaxllm")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("-v", "--verbose", action="store_true", help="debug log")
    common.add_argument("-q", "--quiet", action="store_true", help="warnings only")
    add_serve_command(parser.add_subparsers(required=True), (common,))
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        return int(arguments.run(arguments))
    except (ValueError, OSError) as error:
        print(f"jaxllm: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
