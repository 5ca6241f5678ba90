"""Flags that several benchmarks share, under vLLM's names, and what they stand for."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.errors import ConfigError
from serving.bench.datasets import (
    BenchRequest,
    RandomLengths,
    TextCodec,
    custom_requests,
    random_requests,
    random_word_requests,
    sharegpt_requests,
)

if TYPE_CHECKING:
    from jaxllm.text.tokenizer import Tokenizer

_SAMPLING = (
    "top_p",
    "top_k",
    "min_p",
    "temperature",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)


def add_dataset_arguments(parser: argparse.ArgumentParser, num_prompts: int = 1000) -> None:
    """The group of flags that `requests_from` reads."""
    group = parser.add_argument_group("data set")
    group.add_argument(
        "--dataset-name",
        choices=("random", "sharegpt", "custom"),
        default="random",
        help="random text, a ShareGPT file, or a JSONL file with prompts (default: random)",
    )
    group.add_argument("--dataset-path", type=Path, help="file of sharegpt or custom")
    group.add_argument(
        "--num-prompts", type=int, default=num_prompts, help=f"default: {num_prompts}"
    )
    group.add_argument("--seed", type=int, default=0, help="of lengths, text and arrivals")
    group.add_argument("--input-len", type=int, help="the same as --random-input-len")
    group.add_argument("--output-len", type=int, help="output length of any data set")
    group.add_argument("--random-input-len", type=int, default=1024, help="default: 1024 tokens")
    group.add_argument("--random-output-len", type=int, default=128, help="default: 128 tokens")
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="lengths are uniform within (1 - R) and (1 + R) times the above (default: 0)",
    )
    group.add_argument(
        "--random-prefix-len", type=int, default=0, help="tokens that all prompts share (0)"
    )
    group.add_argument(
        "--sharegpt-output-len", type=int, help="instead of the answers' own lengths"
    )
    group.add_argument(
        "--custom-output-len",
        type=int,
        default=256,
        help="default: 256; -1 takes output_tokens of each entry",
    )
    group.add_argument("--disable-shuffle", action="store_true", help="take entries in order")
    group.add_argument(
        "--no-oversample", action="store_true", help="an error where a file has too few entries"
    )


def check_num_prompts(arguments: argparse.Namespace) -> None:
    """Raises ConfigError where there would be no request."""
    if arguments.num_prompts < 1:
        raise ConfigError(f"--num-prompts {arguments.num_prompts}: must be at least 1")


def requests_from(
    arguments: argparse.Namespace, tokenizer: TextCodec | None, seed: int | None = None
) -> list[BenchRequest]:
    """The requests that the flags ask for; `seed` stands in for their own.

    Raises:
      ConfigError: a flag or the file cannot be used.
    """
    check_num_prompts(arguments)
    count = arguments.num_prompts
    seed = arguments.seed if seed is None else seed
    if arguments.dataset_name == "random":
        lengths = RandomLengths(
            _first(arguments.input_len, arguments.random_input_len),
            _first(arguments.output_len, arguments.random_output_len),
            arguments.random_range_ratio,
            arguments.random_prefix_len,
        )
        if tokenizer is None:
            return random_word_requests(count, lengths, seed)
        return random_requests(count, lengths, tokenizer, seed)
    if arguments.dataset_path is None:
        raise ConfigError(f"--dataset-name {arguments.dataset_name} needs --dataset-path")
    options: dict[str, Any] = {
        "seed": seed,
        "shuffle": not arguments.disable_shuffle,
        "oversample": not arguments.no_oversample,
    }
    if arguments.dataset_name == "sharegpt":
        length = _first(arguments.output_len, arguments.sharegpt_output_len)
        return sharegpt_requests(
            arguments.dataset_path, count, tokenizer, output_len=length, **options
        )
    length = _first(arguments.output_len, arguments.custom_output_len)
    return custom_requests(arguments.dataset_path, count, tokenizer, output_len=length, **options)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Sampling parameters that go into every request; those not given are the server's."""
    group = parser.add_argument_group("sampling")
    for name in _SAMPLING:
        kind = int if name == "top_k" else float
        group.add_argument("--" + name.replace("_", "-"), type=kind)
    group.add_argument("--ignore-eos", action="store_true", help="outputs of the full length")
    group.add_argument("--logprobs", type=int, metavar="N", help="log probabilities per token")
    group.add_argument("--extra-body", type=json.loads, default={}, metavar="JSON")


def request_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of every request from the flags of add_sampling_arguments."""
    fields = {name: getattr(arguments, name) for name in _SAMPLING}
    fields = {name: value for name, value in fields.items() if value is not None}
    if arguments.ignore_eos:
        fields["ignore_eos"] = True
    if arguments.logprobs is not None:
        if arguments.backend == "openai-chat":
            fields |= {"logprobs": True, "top_logprobs": arguments.logprobs}
        else:
            fields["logprobs"] = arguments.logprobs
    if not isinstance(arguments.extra_body, dict):
        raise ConfigError(f"--extra-body {arguments.extra_body!r}: must be a JSON object")
    return fields | arguments.extra_body


def open_tokenizer(model: str) -> "Tokenizer":
    """The tokenizer of a folder, hub id, .gguf file or packaged model.

    Raises:
      ConfigError: it cannot be loaded.
    """
    from jaxllm.checkpoints.resolve import PACKAGED, resolve
    from jaxllm.text.tokenizer import load_tokenizer, tokenizer_format

    path = Path(model)
    try:
        if model in PACKAGED or (path.is_dir() and not (path / "tokenizer.json").exists()):
            path = resolve(model, progress=False).path
        if not path.exists() and model.count("/") != 1:
            # Served under a name of its own; a hub id has one slash.
            raise ConfigError("no such file, folder or hub id")
        return load_tokenizer(path if path.exists() else model, format=tokenizer_format(path))
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"no tokenizer {model!r}: give --tokenizer FOLDER, or --skip-tokenizer-init ({error})"
        ) from None


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
