"""How a program of this folder ends."""

from __future__ import annotations

import sys
from collections.abc import Callable

from autosac.errors import AutosacError


def exit_code(run: Callable[[], int | None]) -> int:
    """Run a program: its own exit code (None: 0). An error that is meant for users becomes one line and its exit code."""
    try:
        return run() or 0
    except AutosacError as e:
        print(f"error: {e}", file=sys.stderr)
        return e.exit_code
