"""What pictures need is asked for before the work, not after it."""

from __future__ import annotations

import argparse
import importlib.util

from autosac.errors import UsageError

_NEEDS = {
    "pareto_html": "plotly",
    "memory_html": "plotly",
    "search_html": "plotly",
    "pareto_png": "matplotlib",
    "memory_png": "matplotlib",
}


def check_drawable(arguments: argparse.Namespace) -> None:
    """UsageError if a picture is asked for and what draws it is not installed."""
    for name, library in _NEEDS.items():
        if getattr(arguments, name, None) is not None and importlib.util.find_spec(library) is None:
            option = "html" if name == "search_html" else name.replace("_", "-")
            raise UsageError(f"--{option} needs {library}, which is not installed: pip install 'autosac[pictures]'")
