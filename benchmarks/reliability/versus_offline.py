"""Output tokens per second over HTTP against the offline API, on the same work, in turns.

`python -m benchmarks.reliability.versus_offline --model FOLDER`. Both engines are loaded before
anything is timed; in each round one runs after the other. The offline one has its own process.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.reliability.harness import ROOT, Reply, launch, together

_CONCURRENCY = 64
_PROMPT_TOKENS = 32


def _prompts(round_number: int) -> list[list[int]]:
    """Prompts that share no prefix with those of another round."""
    chance = random.Random(round_number)
    return [
        [chance.randrange(1000, 20_000) for _ in range(_PROMPT_TOKENS)] for _ in range(_CONCURRENCY)
    ]


def _settings(arguments: argparse.Namespace) -> dict[str, object]:
    return {
        "model": arguments.model,
        "max_model_len": 512,
        "max_num_seqs": _CONCURRENCY,
        "kv_cache_memory": 2 * 2**30,
    }


def _offline(arguments: argparse.Namespace) -> int:
    """Serves rounds on standard input: one number a line, answered by the seconds it took."""
    from jaxllm import LLM, SamplingParams

    llm = LLM(**_settings(arguments), progress=False)
    params = SamplingParams(temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True)
    print("ready", flush=True)
    for line in sys.stdin:
        inputs = [{"prompt_token_ids": ids} for ids in _prompts(int(line))]
        began = time.monotonic()
        outputs = llm.generate(inputs, params, use_tqdm=False)
        seconds = time.monotonic() - began
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(json.dumps([tokens, seconds]), flush=True)
    return 0


async def _online(
    address: tuple[str, int], arguments: argparse.Namespace, number: int
) -> tuple[int, float]:
    bodies = [
        {
            "prompt": ids,
            "max_tokens": arguments.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": arguments.stream,
            **({"stream_options": {"include_usage": True}} if arguments.stream else {}),
        }
        for ids in _prompts(number)
    ]
    began = time.monotonic()
    found = await together(address, bodies, timeout=300)
    seconds = time.monotonic() - began
    tokens = 0
    for reply in found:
        if not isinstance(reply, Reply) or reply.status != 200:
            raise RuntimeError(f"a request failed: {reply!r}")
        text = reply.body.decode()
        last = text.rpartition('"completion_tokens":')[2]
        tokens += int(last.partition(",")[0].partition("}")[0])
    return tokens, seconds


def main(argv: list[str] | None = None) -> int:
    """Prints the tokens per second of each round, and the ratio of their medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=48, help="output tokens of a request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.offline:
        return _offline(arguments)
    settings = _settings(arguments)
    del settings["model"]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    command = [sys.executable, "-m", "benchmarks.reliability.versus_offline", *sys.argv[1:]]
    server = launch(*flags, model=Path(arguments.model))
    try:
        offline = subprocess.Popen(
            [*command, "--offline"], cwd=ROOT, stdin=-1, stdout=-1, text=True, bufsize=1
        )
        if offline.stdin is None or offline.stdout is None:
            raise RuntimeError("no pipes")
        while offline.stdout.readline().strip() != "ready":
            if offline.poll() is not None:
                raise RuntimeError("the offline engine did not start")
        rates: dict[str, list[float]] = {"HTTP": [], "offline": []}
        for number in range(-1, arguments.rounds):
            # Round -1 warms both.
            tokens, seconds = asyncio.run(_online(server.address, arguments, number + 1))
            offline.stdin.write(f"{number + 1}\n")
            offline_tokens, offline_seconds = json.loads(offline.stdout.readline())
            if number >= 0:
                rates["HTTP"].append(tokens / seconds)
                rates["offline"].append(offline_tokens / offline_seconds)
                print(
                    f"round {number}: HTTP {tokens} tokens in {seconds:.2f} s, "
                    f"offline {offline_tokens} in {offline_seconds:.2f} s",
                    flush=True,
                )
        offline.stdin.close()
        offline.wait(60)
    finally:
        server.end()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratio = medians["HTTP"] / medians["offline"]
    print("tokens per second:", ", ".join(f"{k} {v:.1f}" for k, v in medians.items()))
    print(f"HTTP over offline: {ratio:.1%}")
    return int(ratio < 0.95)


if __name__ == "__main__":
    sys.exit(main())
