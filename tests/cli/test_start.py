"""The command as it is installed, while it imports what it needs."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
START = """
import importlib, signal, sys

class AtImport:
    def find_spec(self, name, path=None, target=None):
        if name == "autosac.cli.parser":
            signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, {handler})
sys.meta_path.insert(0, AtImport())
module, _, function = "{entry}".partition(":")
sys.exit(getattr(importlib.import_module(module), function)())
"""


def started(handler: str) -> subprocess.CompletedProcess[str]:
    """``autosac clusters``, interrupted while the command line is imported, with the handler of interrupts from outside."""
    entry = tomllib.loads(PYPROJECT.read_text())["project"]["scripts"]["autosac"]
    program = START.format(handler=handler, entry=entry)
    return subprocess.run(
        [sys.executable, "-c", program, "clusters"], capture_output=True, text=True, check=False, timeout=60
    )


def test_an_interrupt_while_importing_is_one_line() -> None:
    """Exit code 130 and no traceback."""
    ended = started("signal.default_int_handler")
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "autosac: interrupted\n")


def test_an_ignored_interrupt_while_importing_stays_ignored() -> None:
    """As in a shell's background job: the command goes on."""
    ended = started("signal.SIG_IGN")
    assert ended.returncode == 0 and "hgx-h100" in ended.stdout
