"""What is printed while a command works and standard error is no terminal."""

from __future__ import annotations

import re
import time

import pytest

from autosac.cli import progress


def test_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """At every interval a line with the seconds and what was said last, and none after the end."""
    monkeypatch.setattr(progress, "INTERVAL_S", 0.01)
    with progress.progress_line(enabled=True) as say:
        say("first")
        say("[bold]second")
        time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(re.fullmatch(r"autosac: 0 s: \[bold\]second", line) for line in lines)
    time.sleep(0.03)
    assert capsys.readouterr().err == ""


def test_nothing_where_it_is_not_wanted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With --quiet no line is printed, nor for what takes less than the interval."""
    with progress.progress_line(enabled=True) as say:
        say("quick")
    monkeypatch.setattr(progress, "INTERVAL_S", 0.001)
    with progress.progress_line(enabled=False) as say:
        say("unseen")
        time.sleep(0.01)
    assert capsys.readouterr().err == ""
