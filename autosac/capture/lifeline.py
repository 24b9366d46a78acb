"""Processes that end when the one that started them ends, even if that is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.2


def end_with(parent: int) -> None:
    """Called in a process that `parent` has started: this process is killed as soon as that one has ended.

    On Linux the kernel does it, when the *thread* ends that started this process. Elsewhere a thread looks every now and then
    whether the parent is still there.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it ended before this was called
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)
