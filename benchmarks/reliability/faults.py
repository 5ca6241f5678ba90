"""Faults around the server: a full disk under the compile cache, a port that is taken."""

import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.reliability.harness import (
    GREEDY,
    ROOT,
    TINY_MODEL,
    Check,
    Options,
    bar,
    running,
    wait_for,
)


@bar("disk", "no room under the compile cache")
def full_disk(options: Options) -> list[Check]:
    """Files are limited to 4 KiB, as the kernel does it for a disk that is full: writes fail."""
    prefix = (sys.executable, "-c", _LIMITED)
    with tempfile.TemporaryDirectory() as folder:
        # Programs are compiled when they are needed, so that few are.
        flags = ("--max-num-seqs=8", "--enforce-eager", f"--compilation-cache-dir={folder}")
        with running(*flags, prefix=prefix) as server:
            tokens = server.complete(max_tokens=4, **GREEDY)["usage"]["completion_tokens"]
            idle = server.idle_check()
        largest = max((path.stat().st_size for path in Path(folder).rglob("*")), default=0)
        # What was left there must not harm the next start.
        with running(*flags) as server:
            again = server.complete(max_tokens=4, **GREEDY)["usage"]["completion_tokens"]
    return [
        Check("tokens served without a cache", tokens, "", 4, at_least=True),
        Check("largest file it could write", largest, "bytes", resource.getpagesize()),
        Check("tokens after the next start", again, "", 4, at_least=True),
        idle,
    ]


# The log goes to a file, too, which therefore stays short.
_LIMITED = (
    "import os, resource, signal, sys; "
    "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    f"resource.setrlimit(resource.RLIMIT_FSIZE, ({resource.getpagesize()},) * 2); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


@bar("descriptors", "more connections than file descriptors")
def descriptors(options: Options) -> list[Check]:
    """A process may open 64 files; 200 connections come, and go."""
    with running("--max-num-seqs=4", stub={}, prefix=(sys.executable, "-c", _FEW_FILES)) as server:
        held = [socket.create_connection(server.address) for _ in range(200)]
        time.sleep(1.0)
        alive = server.process.poll() is None
        for sock in held:
            sock.close()
        seconds = wait_for(server.is_ready, 30, server.process)
        tokens = server.complete(max_tokens=4)["usage"]["completion_tokens"]
        return [
            Check("server alive meanwhile", float(alive), "", 1, at_least=True),
            Check("until it serves again", seconds, "s", 5),
            Check("tokens of the next request", tokens, "", 4, at_least=True),
            server.idle_check(),
        ]


_FEW_FILES = (
    "import os, resource, sys; "
    "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


@bar("port", "a port that is in use")
def taken_port(options: Options) -> list[Check]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "serving.commands", "serve", str(TINY_MODEL), f"--port={port}"],
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - began
    said = f"cannot listen at 127.0.0.1:{port}" in done.stderr
    return [
        Check("until the exit, the start of Python included", seconds, "s", 3),
        Check("exit code", done.returncode, "", 2),
        Check("the message names the port", float(said), "", 1, at_least=True),
    ]
