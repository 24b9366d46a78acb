"""The command line as a whole: every option of every command, pinned in ``options.txt``, and how commands are stopped.

``AUTOSAC_UPDATE_GOLDEN=1 pytest tests/cli/test_parser.py`` writes the file anew; look at what changed before committing.
"""

from __future__ import annotations

import argparse
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pinned import check

from autosac.cli.parser import build_parser, main

VALUES = ("", "-1", "0", "0.5", "1", "2", "3", "5000", "70000", "1000001", "4294967296", "1e400", "nan", "x")
KEPT = ("nargs", "const", "default", "required", "choices", "metavar")


def accepted(action: argparse.Action) -> str:
    """What becomes of sample values; values that are refused are missing, those that stay texts stand alone."""
    found = []
    for text in VALUES if callable(action.type) else ():
        try:
            value = action.type(text)
        except (argparse.ArgumentTypeError, ValueError, TypeError):
            continue
        found.append(text if isinstance(value, str | Path) and str(value) == text else f"{text}={value!r}")
    return ", ".join(found)


def told(command: argparse.ArgumentParser) -> Iterator[str]:
    """A line for each group and each option."""
    for group in command._action_groups:
        if group._group_actions:
            yield f"  {group.title}"
        for action in group._group_actions:
            if not isinstance(action, argparse._HelpAction | argparse._VersionAction | argparse._SubParsersAction):
                kept = {
                    name: getattr(action, name)
                    for name in ("nargs", "const", "default", "required", "choices", "metavar")
                }
                given = {name: value for name, value in kept.items() if value not in (None, False)}
                name = " ".join(action.option_strings) or action.dest
                yield f"    {name} -> {action.dest} {json.dumps(given, default=str)} {accepted(action)}"
    for exclusive in command._mutually_exclusive_groups:
        yield f"  one of {' '.join(action.dest for action in exclusive._group_actions)}, {exclusive.required}"
    yield f"  defaults {command._defaults}, {command.epilog}"


def test_every_option() -> None:
    """What it is called, its default, what it takes, what it takes for which value, and in which group it stands."""
    parser = build_parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    lines = [line for name, command in commands.choices.items() for line in (name, *told(command))]
    check(Path(__file__).with_name("options.txt"), "\n".join(lines))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "job.toml", "--gpu=--"], "--gpu: -- is not a value"),
        (["diff", "a", "-o--"], "-o: -- is not a value"),
        (["plan"], "the following arguments are required: JOB, --gpu (see autosac plan --help)"),
        (["nothing"], "argument COMMAND: invalid choice: 'nothing'"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is wrong, on one line of standard error, and exit code 2."""
    assert main(words) == 2
    complaint = capsys.readouterr().err
    assert message in complaint and complaint.count("\n") == 1


@pytest.fixture
def in_a_terminal() -> Iterator[None]:
    """Signals as in a terminal: a shell's background processes, and nohup, ignore some of them."""
    usual = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("in_a_terminal")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signals_end_a_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code names the signal; while the command cleans up a second signal does nothing; handlers are put back."""
    number = getattr(signal, name)
    before = signal.getsignal(number)
    cleaned = []

    def stopped(_: object) -> None:
        try:
            signal.raise_signal(number)
        finally:
            for each in ("SIGINT", "SIGTERM", "SIGHUP"):
                signal.raise_signal(getattr(signal, each))
            cleaned.append(name)

    monkeypatch.setattr("autosac.cli.commands.run", stopped)
    assert main(["gpus"]) == 128 + number
    assert cleaned == [name] and signal.getsignal(number) is before


def test_an_ignored_signal_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after nohup: the command goes on."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        monkeypatch.setattr("autosac.cli.commands.run", lambda _: signal.raise_signal(signal.SIGHUP))
        assert main(["gpus"]) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_commands_run_in_any_thread() -> None:
    """Only a main thread can take signals."""
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(main(["clusters", "hgx-h100", "--json"])))
    thread.start()
    thread.join()
    assert codes == [0]
