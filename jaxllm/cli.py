"""Command line: `jaxllm generate | chat | serve | diagnose | bench | convert | plan | simulate`."""

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxllm.config import add_arguments, from_arguments
from jaxllm.errors import ConfigError
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit code (2: the user can mend it)."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(
        level=logging.DEBUG if arguments.verbose else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
    )
    if not arguments.verbose:
        for name in ("jaxllm", "serving", "pallas_kernels"):
            level = logging.WARNING if arguments.quiet else logging.INFO
            logging.getLogger(name).setLevel(level)
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        # Errors of this package and of the system name what is wrong; a traceback adds nothing.
        if arguments.verbose:
            raise
        print(f"jaxllm: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxllm", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("-v", "--verbose", action="store_true", help="debug log and tracebacks")
    common.add_argument("-q", "--quiet", action="store_true", help="no progress, warnings only")

    generate = commands.add_parser(
        "generate", parents=[common], help="continue prompts", description="Continue prompts."
    )
    _add_model(generate)
    _add_prompt(generate)
    generate.add_argument(
        "--json", action="store_true", help="one JSON object a prompt instead of text"
    )
    generate.set_defaults(run=_generate)

    chat = commands.add_parser(
        "chat",
        parents=[common],
        help="talk to a model",
        description="Talk to a model: an interactive session, or one answer to --prompt, --file or "
        "standard input.",
    )
    _add_model(chat)
    _add_prompt(chat)
    chat.add_argument("--system", metavar="TEXT", help="system message")
    chat.set_defaults(run=_chat)

    convert = commands.add_parser(
        "convert",
        parents=[common],
        help="write a model as an Orbax folder",
        description="Write a model as an Orbax folder, which loads without conversion.",
    )
    convert.add_argument("source", help="folder, hub id, .gguf file or packaged model")
    convert.add_argument("dest", type=Path, help="folder to make")
    convert.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: as stored"
    )
    convert.set_defaults(run=_convert)
    from jaxllm.planning.commands import add_plan_command, add_simulate_command
    from serving.bench.commands import add_bench_command
    from serving.commands import add_diagnose_command, add_serve_command

    add_serve_command(commands, parents=(common,))
    add_diagnose_command(commands, parents=(common,))
    add_bench_command(commands, parents=(common,))
    add_plan_command(commands, parents=[common])
    add_simulate_command(commands, parents=[common])
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default=argparse.SUPPRESS,
        help="folder, hub id, .gguf file, Orbax folder, or 'smollm2' (the default)",
    )
    add_arguments(parser.add_argument_group("engine"), skip=frozenset({"model"}))
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--temperature", type=float, help="0 is greedy")
    sampling.add_argument("--top-p", type=float)
    sampling.add_argument("--top-k", type=int)
    sampling.add_argument("--min-p", type=float)
    sampling.add_argument("--max-tokens", type=int, default=256, help="default: 256")
    sampling.add_argument("--sampling-seed", type=int, help="seed of the request")
    sampling.add_argument("--ignore-eos", action="store_true")


def _add_prompt(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", action="append", metavar="TEXT", help="may be repeated")
    source.add_argument("--file", type=Path, help="file that holds the prompt")


def _prompts(arguments: argparse.Namespace) -> list[str]:
    """Prompts from --prompt, --file or a piped standard input; [] for a terminal."""
    if arguments.prompt:
        return arguments.prompt
    if arguments.file:
        return [arguments.file.read_text()]
    if not sys.stdin.isatty():
        text = sys.stdin.read().strip()
        return [text] if text else []
    return []


def _sampling_params(arguments: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    names = ("temperature", "top_p", "top_k", "min_p")
    chosen: dict[str, Any] = {
        name: getattr(defaults if getattr(arguments, name) is None else arguments, name)
        for name in names
    }
    return SamplingParams(
        **chosen,
        max_tokens=arguments.max_tokens,
        seed=arguments.sampling_seed,
        ignore_eos=arguments.ignore_eos,
        output_kind=RequestOutputKind.DELTA,
    )


def _start(arguments: argparse.Namespace) -> Any:
    from jaxllm.llm import LLM

    return LLM.from_config(from_arguments(arguments), progress=not arguments.quiet)


def _generate(arguments: argparse.Namespace) -> int:
    prompts = _prompts(arguments)
    if not prompts:
        raise ConfigError("no prompt: give --prompt, --file or standard input")
    llm = _start(arguments)
    params = _sampling_params(arguments, llm.get_default_sampling_params())
    for output in llm.generate(prompts, params, use_tqdm=not arguments.quiet):
        completion = output.outputs[0]
        if arguments.json:
            record = {
                "prompt": output.prompt,
                "text": completion.text,
                "token_ids": completion.token_ids,
                "finish_reason": completion.finish_reason,
            }
            print(json.dumps(record, ensure_ascii=False))
        else:
            print(f"{output.prompt}{completion.text}")
    return 0


def _chat(arguments: argparse.Namespace) -> int:
    one_shot = _prompts(arguments)
    llm = _start(arguments)
    params = _sampling_params(arguments, llm.get_default_sampling_params())
    start = [{"role": "system", "content": arguments.system}] if arguments.system else []
    if one_shot or not sys.stdin.isatty():
        for text in one_shot:
            messages = [*start, {"role": "user", "content": text}]
            _print_answer(llm, messages, params)
        return 0
    print("Type a message; /reset starts over, /exit or Ctrl-D ends.")
    messages = list(start)
    for text in _lines():
        if text == "/exit":
            break
        if text == "/reset":
            messages = list(start)
            continue
        messages.append({"role": "user", "content": text})
        try:
            answer = _print_answer(llm, messages, params)
        except KeyboardInterrupt:
            print("\n[stopped]")
            messages.pop()
            continue
        except ValueError as error:
            print(f"[{error}; /reset starts over]")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})
    return 0


def _lines() -> Iterator[str]:
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /exit ends the session)")
            continue
        if text:
            yield text


def _print_answer(llm: Any, messages: list[dict[str, str]], params: SamplingParams) -> str:
    pieces = []
    for output in llm.stream({"prompt_token_ids": llm.encode_chat(messages)}, params):
        pieces.append(output.outputs[0].text)
        print(pieces[-1], end="", flush=True)
    print()
    return "".join(pieces)


def _convert(arguments: argparse.Namespace) -> int:
    from jaxllm.checkpoints.orbax import convert

    convert(arguments.source, arguments.dest, dtype=arguments.dtype)
    print(f"wrote {arguments.dest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
