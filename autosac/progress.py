"""A line that says what is going on, for anything that takes longer than two seconds; nothing where nobody watches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def progress_line(*, enabled: bool) -> Iterator[Callable[[str], None]]:
    """A function that shows a line of text on standard error. It may be called from any thread."""
    stderr = Console(stderr=True)
    if not enabled or not stderr.is_terminal:
        yield lambda _: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=stderr, transient=True) as progress:
        task = progress.add_task("starting the capture process", total=None)
        yield lambda text: progress.update(task, description=text)
