"""Options of the commands about the tool itself: ``gpus``, ``clusters``, ``cache``, ``completion``. Imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any

from autosac.cli.options import add_output

SHELLS = ("bash", "zsh", "tcsh")


def add_gpus(commands: argparse._SubParsersAction[Any]) -> None:
    """The options of ``autosac gpus``."""
    command = commands.add_parser("gpus", help="list the GPUs that are known, or all that is known of one")
    command.add_argument("name", nargs="?", metavar="GPU", help="a name, its beginning, or a profile file")
    add_output(command)
    command.set_defaults(run="gpus")


def add_clusters(commands: argparse._SubParsersAction[Any]) -> None:
    """The options of ``autosac clusters``."""
    command = commands.add_parser("clusters", help="list the clusters that are known, or all that is known of one")
    command.add_argument("name", nargs="?", metavar="CLUSTER", help="a name, its beginning, or a file")
    add_output(command)
    command.set_defaults(run="clusters")


def add_cache(commands: argparse._SubParsersAction[Any]) -> None:
    """The options of ``autosac cache``."""
    command = commands.add_parser("cache", help="show where captures are kept and how much they take, or remove them")
    command.add_argument("--clear", action="store_true", help="remove all captures that are kept")
    add_output(command)
    command.set_defaults(run="cache")


def add_completion(commands: argparse._SubParsersAction[Any]) -> None:
    """The options of ``autosac completion``."""
    command = commands.add_parser("completion", help="print what makes a shell complete autosac's arguments")
    command.epilog = (
        'bash: put  eval "$(autosac completion bash)"  into ~/.bashrc. '
        "zsh: autosac completion zsh > FOLDER/_autosac, where FOLDER is in $fpath before compinit"
    )
    command.add_argument("shell", choices=SHELLS, help="which shell")
    output = command.add_argument_group("output")
    output.add_argument("--debug", action="store_true", help="show tracebacks")
    command.set_defaults(run="completion")
