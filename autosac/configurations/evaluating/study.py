"""A study: the folder in which a search keeps what it has learnt, so that it can go on after any end.

The record is an Optuna study in journal storage: one finished trial for each evaluation, whose user attributes hold the
question (`key`) and the answer. Several searches, on several machines with a common file system, may share one: each asks
the journal before it starts an evaluation. Optuna's own tools (its dashboard, its plots) read the same file.

A search is a function of its inputs and of the answers: resumed, it asks the same questions and finds most of them answered.

A process that is killed while it writes leaves half a line, and a lock. The next search cuts the one off and takes the other
after some seconds. Each answer has a digest: one that was changed since is asked for again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial, TrialState, create_trial

from autosac.display.printable import printable
from autosac.errors import UsageError

_NAME = "autosac"
_FILE = "journal.log"
JOBS = "jobs"  # folder of job files that evaluations take
_BEGINS = b'{"op_code"'  # every line of a journal
_STALE_S = 10  # after which a lock is nobody's
_DAMAGES = (ValueError, KeyError, TypeError, AttributeError, IndexError, AssertionError)  # what Optuna raises then


class Study:
    """See the module's docstring. `identity`: what the search is of; another search's study is refused (UsageError)."""

    def __init__(self, folder: Path, identity: Mapping[str, Any], *, resume: bool) -> None:
        self.folder = folder
        journal = folder / _FILE
        if resume and not self.is_in(folder):
            raise UsageError(f"--resume {folder}: there is no study (no {_FILE}); give --study {folder} to begin one")
        if not resume and self.is_in(folder):
            raise UsageError(
                f"{folder} holds a study: --resume {folder} continues it, or give another folder (--study)"
            )
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"study {folder} is a file: give a folder")
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._new = not self.is_in(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = str(journal.absolute())  # a lock is a link to it
            lock = JournalFileSymlinkLock(path, grace_period=_STALE_S)
            backend = JournalFileBackend(path, lock)
            with self._understood():
                _cut_half_a_line(journal, lock)
                self._study = optuna.create_study(
                    study_name=_NAME, storage=JournalStorage(backend), load_if_exists=True
                )
        except OSError as e:
            raise UsageError(f"study {folder}: {e.strerror or e}; give a folder that can be written (--study)") from e
        self._check(identity)
        self._answers: dict[str, dict[str, Any]] = {}
        self._seen = 0

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether a folder holds a study."""
        return (folder / _FILE).is_file()

    @contextlib.contextmanager
    def _understood(self) -> Iterator[None]:
        """UsageError for a journal that Optuna cannot read."""
        try:
            yield
        except _DAMAGES as e:
            why = printable(f"{type(e).__name__}: {e}")
            raise UsageError(f"study {self.folder}: {_FILE} is damaged ({why}); give another folder (--study)") from e

    @contextlib.contextmanager
    def _there(self) -> Iterator[None]:
        """As `_understood`, also for one that is gone, or cannot be written any more."""
        try:
            with self._understood():
                yield
        except OSError as e:
            why = e.strerror or e
            raise UsageError(f"study {self.folder}: {why}; --resume {self.folder} continues once that is fixed") from e

    def _check(self, identity: Mapping[str, Any]) -> None:
        with self._there():
            known = self._study.user_attrs.get("identity")
            assert known is None or isinstance(known, dict), "no identity"
        plain = json.loads(json.dumps(identity))
        if known is None:
            with self._there():
                self._study.set_user_attr("identity", plain)
            return
        for name, value in plain.items():
            if name == "job" and known.get(name) != value:
                raise UsageError(
                    f"study {self.folder} belongs to another job, or to this one before it was changed; give another folder "
                    "(--study)"
                )
            if known.get(name) != value:
                raise UsageError(
                    f"study {self.folder} belongs to another search: its {name} is {_short(known.get(name))}, here it is "
                    f"{_short(value)}; give another folder (--study)"
                )

    def forget(self) -> None:
        """Remove a study that was begun here and has no answers but refusals: the search could not start."""
        if self._new and not (len(self) and any("refused" not in answer for answer in self._answers.values())):
            (self.folder / _FILE).unlink(missing_ok=True)
            shutil.rmtree(self.folder / JOBS, ignore_errors=True)
            with contextlib.suppress(OSError):  # there is something else in it
                self.folder.rmdir()

    def answer(self, key: str) -> dict[str, Any] | None:
        """What is known of a question, by whoever asked it."""
        with self._there():
            trials = self._study.get_trials(deepcopy=False)
        for trial in trials[self._seen :]:
            self._note(trial)
        self._seen = len(trials)
        return self._answers.get(key)

    def _note(self, trial: FrozenTrial) -> None:
        key, answer = trial.user_attrs.get("key"), trial.user_attrs.get("answer")
        if isinstance(answer, dict) and trial.user_attrs.get("digest") == _digest(key, answer):
            self._answers[str(key)] = answer

    def record(
        self, key: str, answer: dict[str, Any], knobs: Mapping[str, str | int | bool], value: float | None
    ) -> None:
        """Keep an answer. `knobs` and `value` (milliseconds; None: none fits) are for who looks at the study with Optuna."""
        trial = create_trial(
            state=TrialState.FAIL if value is None else TrialState.COMPLETE,
            value=value,
            user_attrs={"key": key, "answer": answer, "digest": _digest(key, answer), "knobs": dict(knobs)},
        )
        with self._there():
            self._study.add_trial(trial)
        self._answers[key] = answer

    def __len__(self) -> int:
        self.answer("")
        return len(self._answers)


def _cut_half_a_line(journal: Path, lock: JournalFileSymlinkLock) -> None:
    """What a killed process has left of a line at the end, which would be continued by the next one."""
    link = journal.with_name(f"{journal.name}.lock")
    if link.is_symlink() and not link.exists():  # of a folder that was moved: nobody would take it
        link.unlink(missing_ok=True)
    lock.acquire()
    try:
        with journal.open("r+b") as file:
            content = file.read()
            if content and not content.startswith(_BEGINS):
                raise ValueError("it is no journal")
            if not content.endswith(b"\n"):
                file.truncate(content.rfind(b"\n") + 1)
    finally:
        lock.release()


def _digest(key: Any, answer: Any) -> str:
    text = json.dumps([key, answer], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _short(value: Any) -> str:
    text = printable(str(value))
    return text if len(text) <= 60 else f"{text[:57]}..."
