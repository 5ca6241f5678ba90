"""Engines in processes of their own, all stopped but the one whose turn it is."""

import argparse
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import IO, Any

from benchmarks.compare import process_group

# The script, which environment it runs in (None: the project's own), and its arguments.
ENGINES: dict[str, tuple[str, str | None, tuple[str, ...]]] = {
    "jaxllm": ("engine_jaxllm", None, ()),
    "jaxllm-float32": ("engine_jaxllm", None, ("--dtype", "float32")),
    "vllm": ("engine_vllm", "vllm", ()),
    "vllm-default-binding": ("engine_vllm", "vllm", ("--bind", "auto")),
    "vllm-float32": ("engine_vllm", "vllm", ("--dtype", "float32")),
    "vllm-float32-eager": ("engine_vllm", "vllm", ("--dtype", "float32", "--enforce-eager")),
    "llama-cpp": ("engine_llama_cpp", "llama-cpp", ()),
    "transformers": ("engine_transformers", "torch", ()),
    "transformers-float32": ("engine_transformers", "torch", ("--dtype", "float32")),
}

# Engines that run each workload in the first round only, since a run takes them many minutes.
ONCE = frozenset({"transformers", "transformers-float32"})


class EngineFailedError(Exception):
    """An engine stopped without an answer."""


@dataclasses.dataclass(slots=True)
class EngineProcess:
    """An engine that is up, and stopped unless it is its turn."""

    name: str
    process: "subprocess.Popen[bytes]"
    startup_s: float

    @classmethod
    def start(cls, name: str, setup: str, args: argparse.Namespace) -> "EngineProcess":
        """Starts an engine, waits until it is up, and stops it. EngineFailedError if it ends."""
        script, environment, extra = ENGINES[name]
        python = sys.executable if environment is None else args.peers / environment / "bin/python"
        log = (args.out / f"{name}-{setup}.log").open("w")
        process = subprocess.Popen(
            [
                *(python, "-m", f"benchmarks.compare.{script}"),
                *("--model", args.model, "--name", name, "--serve", "--outputs"),
                *("--setup", setup, *extra),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            bufsize=0,
            start_new_session=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        engine = cls(name, process, 0.0)
        begin = time.perf_counter()
        engine._answer(None)
        engine.startup_s = time.perf_counter() - begin
        process_group.send(engine.process, signal.SIGSTOP)
        return engine

    def run(self, workload: str, round_number: int, limit: float) -> dict[str, Any]:
        """One timed run while all others are stopped; EngineFailedError after `limit` seconds."""
        process_group.send(self.process, signal.SIGCONT)
        try:
            _pipe(self.process.stdin).write(f"{workload} {round_number}\n".encode())
            return self._answer(limit)
        finally:
            process_group.send(self.process, signal.SIGSTOP)

    def close(self) -> None:
        """Ends the engine and its workers."""
        process_group.end(self.process)

    def _answer(self, limit: float | None) -> dict[str, Any]:
        """The next line; EngineFailedError if none comes within `limit` seconds."""
        out = _pipe(self.process.stdout)
        if limit is not None and not select.select([out], [], [], limit)[0]:
            raise EngineFailedError(f"{self.name} was not done after {limit:.0f} s")
        line = out.readline()
        if not line:
            raise EngineFailedError(f"{self.name} ended with {self.process.wait()}; see its log")
        return json.loads(line)


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise EngineFailedError("the engine was started without pipes")
    return stream
