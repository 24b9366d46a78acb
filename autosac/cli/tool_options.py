"""Options of commands that have few: ``gpus``, ``clusters``, ``cache``, ``chakra``, ``completion``. Imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any

from autosac.cli.options import add_command, add_output, filled_path

SHELLS = ("bash", "zsh", "tcsh")


def add_gpus(commands: argparse._SubParsersAction[Any]) -> None:
    """The options of ``autosac gpus``."""
    command = add_command(commands, "gpus", "list the known GPUs, or show one of them in detail")
    command.add_argument("name", nargs="?", metavar="GPU", help="a name, the beginning of a name, or a profile file")
    add_output(command)
    command.set_defaults(run="gpus")


def add_clusters(commands: argparse._SubParsersAction[Any]) -> None:
    """The options of ``autosac clusters``."""
    command = add_command(commands, "clusters", "list the known clusters, or show one of them in detail")
    command.add_argument("name", nargs="?", metavar="CLUSTER", help="a name, the beginning of a name, or a file")
    add_output(command)
    command.set_defaults(run="clusters")


def add_cache(commands: argparse._SubParsersAction[Any]) -> None:
    """The options of ``autosac cache``."""
    command = add_command(commands, "cache", "show the location and size of the capture cache, or clear it")
    command.add_argument("--clear", action="store_true", help="remove all captures from the cache")
    add_output(command)
    command.set_defaults(run="cache")


def add_chakra(commands: argparse._SubParsersAction[Any]) -> None:
    """The options of ``autosac chakra``."""
    command = add_command(commands, "chakra", "execute the Chakra execution traces of all ranks together")
    command.add_argument(
        "folder", type=filled_path, metavar="DIR", help="folder with the traces NAME.RANK.et and comm_group.json"
    )
    add_output(command)
    command.set_defaults(run="chakra")


def add_completion(commands: argparse._SubParsersAction[Any]) -> None:
    """The options of ``autosac completion``."""
    command = add_command(commands, "completion", "print a shell completion script")
    command.epilog = (
        'bash: add  eval "$(autosac completion bash)"  to ~/.bashrc. '
        "zsh: autosac completion zsh > FOLDER/_autosac, with FOLDER in $fpath before compinit"
    )
    command.add_argument("shell", choices=SHELLS, help="the shell")
    output = command.add_argument_group("output")
    output.add_argument("--debug", action="store_true", help="show tracebacks")
    command.set_defaults(run="completion")
