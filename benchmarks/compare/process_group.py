"""A process and its children, stopped, continued and ended as one."""

import contextlib
import os
import signal
import subprocess
from typing import Any


def send(process: "subprocess.Popen[Any]", number: signal.Signals) -> None:
    """Signals the group that a process started with `start_new_session` leads, if it still is."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def end(process: "subprocess.Popen[Any]") -> None:
    """Ends the group, stopped or not; children too, which may outlive the process that started
    them."""
    send(process, signal.SIGCONT)
    send(process, signal.SIGTERM)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
    finally:
        send(process, signal.SIGKILL)
        process.wait()
