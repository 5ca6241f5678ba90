"""Ties the life of a process to that of its parent, and tells the parent that it lives."""

import ctypes
import os
import signal
import sys
import threading
import time
from types import FrameType

PULSE_SECONDS = 1.0
ALIVE = b"."
COMPILING = b"c"
_PR_SET_PDEATHSIG = 1
# A function of one of these modules on the stack of the step thread means that XLA compiles.
_COMPILER_MODULES = frozenset({"jax._src.compiler", "jaxllm.execution.compilation"})


def die_with_parent(parent_pid: int, lifeline: int) -> None:
    """Ends this process when its parent does, however that happens.

    Args:
      parent_pid: who started this process.
      lifeline: read end of a pipe whose only write end the parent holds.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)

    def wait_for_the_end() -> None:
        while os.read(lifeline, 4096):
            pass
        os._exit(1)

    threading.Thread(target=wait_for_the_end, name="lifeline", daemon=True).start()


def start_pulse(pipe: int) -> None:
    """Writes a byte a second to `pipe`: ALIVE, or COMPILING while the main thread compiles."""
    main = threading.main_thread().ident

    def beat() -> None:
        while True:
            frame = sys._current_frames().get(main or 0)
            try:
                os.write(pipe, COMPILING if _compiles(frame) else ALIVE)
            except OSError:
                return
            time.sleep(PULSE_SECONDS)

    threading.Thread(target=beat, name="pulse", daemon=True).start()


def _compiles(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__") in _COMPILER_MODULES:
            return True
        frame = frame.f_back
    return False
