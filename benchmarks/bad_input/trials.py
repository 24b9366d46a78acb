"""One malformed input: made, given to the command line in this process, and its answer judged."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from autosac.cli.parser import main

PATIENCE_S = 20
_MOST_CHARACTERS = 1500
_NOT_A_NUMBER = re.compile(r"\b(NaN|nan|Infinity|inf) (ms|s|GiB|MiB|tokens)|: (NaN|-?Infinity)\b")
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e]")


class Accepted(BaseException):
    """The input has been checked, and the work that it asks for would begin."""


class Hang(BaseException):
    """Nothing came in time."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A command. `refuse`: it has to be refused (True), has to work (False), or either.

    `names`: any of them is in the message.
    """

    kind: str
    what: str
    arguments: tuple[str, ...]
    refuse: bool | None = True
    names: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of it: "ok", "traceback", "hang", "wrongly accepted", "wrongly refused" or "unclear", and the evidence."""

    verdict: str
    said: str = ""


def attempt(trial: Trial) -> Outcome:
    """Run the command until it ends or its work would begin, and judge."""
    out, err = io.StringIO(), io.StringIO()
    accepted = False
    code: int | None = 0
    try:
        with _no_captures(), _within(PATIENCE_S), _environment(trial.environment):
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = main(list(trial.arguments))
        accepted = code == 0
    except Accepted:
        accepted = True
    except Hang:
        return Outcome(verdict="hang")
    except SystemExit as e:  # --help
        return Outcome(verdict="unclear" if e.code else "ok", said=f"exit {e.code}")
    except Exception:
        return Outcome(verdict="traceback", said=traceback.format_exc(limit=-4))
    return _judge(trial, accepted, code, out.getvalue(), err.getvalue())


def _judge(trial: Trial, accepted: bool, code: int | None, out: str, err: str) -> Outcome:
    if "Traceback" in out + err:
        return Outcome(verdict="traceback", said=err)
    if accepted:
        if trial.refuse:
            return Outcome(verdict="wrongly accepted", said=out[-300:])
        if _CONTROL.search(out) or _CONTROL.search(err):
            return Outcome(verdict="unclear", said=f"control characters reach the terminal: {out[:300]!r}")
        if err or _NOT_A_NUMBER.search(out):
            return Outcome(
                verdict="unclear", said=f"warnings, or figures that are no numbers: {err[:300]!r} {out[:300]!r}"
            )
        return Outcome(verdict="ok")
    if trial.refuse is False:
        return Outcome(verdict="wrongly refused", said=err)
    lines = err.split("\n")
    clear = (
        code in (1, 2)
        and out == ""
        and len(lines) == 2
        and lines[0].startswith("autosac: ")
        and lines[0].isprintable()
        and 20 <= len(err) <= _MOST_CHARACTERS
        and (not trial.names or any(name in err for name in trial.names))
    )
    return Outcome(verdict="ok" if clear else "unclear", said=f"exit {code}: {out[:200]!r} {err[:600]!r}")


@contextlib.contextmanager
def _no_captures() -> Iterator[None]:
    """Where a job or a model would be run, the input counts as accepted."""

    def begin(*_: Any, **__: Any) -> Any:
        raise Accepted

    def wanted(arguments: Any, gpu: Any) -> Any:
        from autosac.cli import calibrate as calibrate_command

        if arguments.job is not None:
            calibrate_command._job_trace(arguments, gpu)
        raise Accepted

    with (
        mock.patch("autosac.capture.process.server.CaptureServer.submit", begin),
        mock.patch("autosac.bench.subjects.EagerCaptures.__init__", begin),
        mock.patch("autosac.cli.calibrate._wanted", wanted),
    ):
        yield


@contextlib.contextmanager
def _within(seconds: int) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    names = ("NGPU", "WORLD_SIZE", "RANK", "LOCAL_RANK", "AUTOSAC_CACHE", "XDG_CACHE_HOME")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    with mock.patch.dict(os.environ, {**kept, **changes}, clear=True):
        yield
