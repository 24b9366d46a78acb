"""The page of the command line: the help of every command, as the command prints it.

python docs/pictures/commands.py FOLDER      # writes commands.md
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

from autosac.cli.parser import build_parser

WIDTH = 100


def page() -> str:
    """A section for each command with its help, as Markdown."""
    (commands,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    helps = {}
    for name, command in commands.choices.items():
        command.formatter_class = functools.partial(argparse.HelpFormatter, width=WIDTH)
        command.color = False  # Python 3.14 would color it on a terminal
        helps[name] = command.format_help()
    return "".join(f"## autosac {name}\n\n```text\n{text}```\n\n" for name, text in helps.items())


def write_all(folder: Path) -> None:
    """Write the sections."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "commands.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
