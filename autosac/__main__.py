"""The ``autosac`` command, also as ``python -m autosac``.

Importing the command line takes a while, in which Ctrl-C would show a traceback. Nothing has been started yet then, so the
process leaves at once; afterwards `autosac.cli.parser` lets the command clean up.
"""

from __future__ import annotations

import os
import signal
import sys


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


if __name__ == "__main__":
    sys.exit(main())
