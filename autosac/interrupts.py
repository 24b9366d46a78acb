"""Blocks that Python's signal handlers do not interrupt, and interrupts that come later."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def signals_later() -> Iterator[None]:
    """Python's signal handlers run after the block: none of their exceptions can come between two of its statements.

    For short blocks only, such as one that starts a process and records that it was started.
    """
    caught: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {n: h for n in signal.valid_signals() if callable(h := signal.getsignal(n))}
    try:
        for number in handlers:
            signal.signal(number, lambda n, _: caught.append(n))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for missed in caught:
            signal.raise_signal(missed)


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C takes effect after the block; in a process that is started in it, once that calls `take_interrupts`: while it
    imports, it would show a traceback.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def take_interrupts() -> None:
    """What has been held back so far comes now."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
