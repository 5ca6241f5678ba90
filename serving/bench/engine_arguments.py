"""The engine's own flags in a benchmark, and the engine they stand for."""

import argparse
from typing import TYPE_CHECKING, Any

from jaxllm import config as engine_settings

if TYPE_CHECKING:
    from jaxllm.llm import LLM


def add_engine_arguments(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """The model and a flag per field of EngineConfig."""
    parser.add_argument(
        "model_path",
        nargs="?",
        metavar="model",
        help="folder, hub id, .gguf file, Orbax folder, or 'smollm2' (the default)",
    )
    group = parser.add_argument_group("engine")
    group.add_argument("--model", default=argparse.SUPPRESS, help="the same as the model's place")
    engine_settings.add_arguments(group, skip=frozenset({"model", "seed"}))
    parser.set_defaults(**defaults)


def engine_config(arguments: argparse.Namespace) -> engine_settings.EngineConfig:
    """EngineConfig from the flags."""
    if arguments.model_path is not None:
        arguments.model = arguments.model_path
    return engine_settings.from_arguments(arguments)


def start(arguments: argparse.Namespace) -> "LLM":
    """The engine, in this process."""
    from jaxllm.llm import LLM

    return LLM.from_config(engine_config(arguments), progress=not arguments.quiet)
