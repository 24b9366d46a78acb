"""How often Python looks for garbage while a command runs."""

from __future__ import annotations

import gc

import pytest

from autosac.cli import commands
from autosac.cli.parser import build_parser


@pytest.mark.parametrize(
    ("command", "words", "factor"),
    [("gpus", ["gpus"], 20000), ("calibrate", ["calibrate", "-o", "profile.toml"], 1)],
)
def test_only_commands_that_run_no_model_collect_rarely(
    monkeypatch: pytest.MonkeyPatch, command: str, words: list[str], factor: int
) -> None:
    """A command that simulates makes 10,000,000 of Python's default of 500 new objects; one that times operators leaves it,
    and so does every command when it has ended.
    """
    found: list[int] = []

    def noting(_: object) -> None:
        found.append(gc.get_threshold()[0])

    noting.__name__ = command
    monkeypatch.setattr(commands, command, noting)
    before = gc.get_threshold()
    gc.set_threshold(500, *before[1:])
    try:
        commands.run(build_parser().parse_args(words))
        after = gc.get_threshold()
    finally:
        gc.set_threshold(*before)
    assert (found, after) == ([500 * factor], (500, *before[1:]))
