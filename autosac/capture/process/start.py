"""The capture process's program: ``python -P start.py FD PARENT FOLDER PROGRAMS SALT AUTOSAC CURRENT`` (see `worker`).

The option ``-P`` keeps Python from searching for modules in the current folder, which may hold a ``json.py`` of the user's.
That folder, CURRENT, comes last, for a job's own modules may be there: none of them ever stands for a module of Python's or
an installed one. AUTOSAC is where this package lies, for the case that it is not installed.
"""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    """Complete the search path, then serve."""
    answers, parent, folder, programs, salt, autosac, current = sys.argv[1:]
    if importlib.util.find_spec("autosac") is None:
        sys.path.append(autosac)
    if current not in sys.path:
        sys.path.append(current)
    from autosac.capture.process.worker import main as serve

    serve(int(answers), int(parent), folder, programs, salt)


if __name__ == "__main__":
    main()
