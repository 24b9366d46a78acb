"""What is going on, on standard error: on a terminal a line that changes, elsewhere (a file, a pipe) a new line every ten
seconds.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from autosac.display.terminal import PlainConsole
from autosac.torch_version import too_new

INTERVAL_S = 10.0
_START = "starting the capture process"


@contextlib.contextmanager
def progress_line(*, enabled: bool) -> Iterator[Callable[[str], None]]:
    """A function that says what is being done now. It may be called from any thread."""
    stderr = PlainConsole(stderr=True)
    if enabled and (warning := too_new()) is not None:
        print(f"autosac: {warning}", file=sys.stderr, flush=True)
    if not enabled:
        yield lambda _: None
    elif not stderr.is_terminal:
        with _lines(INTERVAL_S) as say:
            yield say
    else:
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        with Progress(*columns, console=stderr, transient=True) as progress:
            task = progress.add_task(_START, total=None)
            yield lambda text: progress.update(task, description=text)


@contextlib.contextmanager
def _lines(interval_s: float) -> Iterator[Callable[[str], None]]:
    """Print a line every `interval_s` seconds: the seconds so far, and what is being done."""
    begin = time.monotonic()
    latest = [_START]
    over = threading.Event()

    def report() -> None:
        while not over.wait(interval_s):
            print(f"autosac: {time.monotonic() - begin:.0f} s: {latest[0]}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield lambda text: latest.__setitem__(0, text)
    finally:
        over.set()
        thread.join()
