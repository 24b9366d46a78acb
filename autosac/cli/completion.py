"""``autosac completion``: what makes a shell complete commands, options, files, and the names of GPUs and clusters (shtab)."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence

from autosac.estimator import known_clusters, known_hardware

_GPUS, _CLUSTERS = "_autosac_gpus", "_autosac_clusters"
_NAMED = {"gpu": _GPUS, "cluster": _CLUSTERS}
_FILE = re.compile(r"FILE|\w+\.\w+")  # as help texts call a file: FILE, PLAN.json


def completion(arguments: argparse.Namespace) -> None:
    """Run it: the script of a shell on standard output."""
    print(script(arguments.parser, arguments.shell))


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script that completes a parser's arguments in bash, zsh or tcsh."""
    import shtab

    for command, action in _actions(parser):
        if action.option_strings == [] and action.dest == "name":
            named = {"gpus": _GPUS, "clusters": _CLUSTERS}.get(command)
        else:
            named = _NAMED.get(action.dest)
        if named is not None:
            names = known_hardware() if named == _GPUS else known_clusters()
            action.complete = {"bash": named, "zsh": named, "tcsh": " ".join(names)}  # type: ignore[attr-defined]
        elif action.metavar == "DIR":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.dest == "job" or _FILE.fullmatch(str(action.metavar)):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    preamble = {"bash": _bash(), "zsh": _zsh(), "tcsh": ""}[shell]
    return str(shtab.complete(parser, shell=shell, preamble=preamble))


def _actions(parser: argparse.ArgumentParser, command: str = "") -> Iterator[tuple[str, argparse.Action]]:
    """The parser's actions and those of its commands, with the command's name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from _actions(child, name)
        else:
            yield command, action


def _bash() -> str:
    """Functions that complete names, and files beside them."""

    def function(name: str, names: Sequence[str]) -> str:
        return f'{name}() {{ compgen -W "{" ".join(names)}" -- "$1"; compgen -f -- "$1"; }}'

    return "\n".join((function(_GPUS, known_hardware()), function(_CLUSTERS, known_clusters())))


def _zsh() -> str:
    """The same for zsh."""

    def function(name: str, what: str, names: Sequence[str]) -> str:
        return f"{name}() {{ _alternative 'names:{what}:({' '.join(names)})' 'files:profile:_files' }}"

    return "\n".join((function(_GPUS, "GPU", known_hardware()), function(_CLUSTERS, "cluster", known_clusters())))
