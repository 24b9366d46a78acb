"""Options that several commands have."""

from __future__ import annotations

import argparse


def add_output(command: argparse.ArgumentParser, *, debug: str = "show tracebacks") -> None:
    """How a command prints; `debug` is what --debug says of itself."""
    output = command.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON for machines")
    output.add_argument("--quiet", action="store_true", help="no progress display")
    output.add_argument("--debug", action="store_true", help=debug)
