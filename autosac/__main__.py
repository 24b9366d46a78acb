"""The ``autosac`` command, also as ``python -m autosac``.

Importing the command line takes a while, in which Ctrl-C would show a traceback. Nothing has been started yet then, so the
process leaves at once; afterwards `autosac.cli.parser` lets the command clean up.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from typing import NoReturn


def _leave(number: int, _: object) -> None:
    """Not as an exception, which whoever imports may catch or wrap."""
    try:
        os.write(2, b"autosac: interrupted\n")
    finally:
        os._exit(128 + number)


def main() -> int:
    """Run the command line. Returns the exit code."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in a shell's background job, where it stays so
        signal.signal(signal.SIGINT, _leave)
    from autosac.cli.parser import main as run

    return run()


def command() -> NoReturn:
    """What a shell runs: `main`, then the end of the process, at once. Traces are millions of objects, and to take them down
    one by one takes seconds.
    """
    code = main()
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    command()
