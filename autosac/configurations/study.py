"""A study: the folder in which a search keeps what it has learnt, so that it can go on after any end.

The record is an Optuna study in journal storage: one finished trial for each evaluation, whose user attributes hold the
question (`key`) and the answer. Several searches, on several machines with a common file system, may share one: each asks
the journal before it starts an evaluation. Optuna's own tools (its dashboard, its plots) read the same file.

A search is a function of its inputs and of the answers: resumed, it asks the same questions and finds most of them answered.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial

from autosac.display.printable import printable
from autosac.errors import UsageError

_NAME = "autosac"
_FILE = "journal.log"
JOBS = "jobs"  # folder of job files that evaluations take


class Study:
    """See the module's docstring. `identity`: what the search is of; another search's study is refused (UsageError)."""

    def __init__(self, folder: Path, identity: Mapping[str, Any], *, resume: bool) -> None:
        self.folder = folder
        journal = folder / _FILE
        if resume and not self.is_in(folder):
            raise UsageError(f"--resume {folder}: there is no study (no {_FILE}); give --study {folder} to begin one")
        if not resume and self.is_in(folder):
            raise UsageError(f"{folder} holds a study: --resume {folder} continues it, or give another folder")
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"study {folder} is a file: give a folder")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._new = not self.is_in(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            storage = JournalStorage(JournalFileBackend(str(journal)))
            self._study = optuna.create_study(study_name=_NAME, storage=storage, load_if_exists=True)
        except OSError as e:
            raise UsageError(f"study {folder}: {e.strerror or e}") from e
        except (ValueError, KeyError, json.JSONDecodeError) as e:
            raise UsageError(f"study {folder}: {_FILE} is damaged: {printable(str(e))}") from e
        self._check(identity)
        self._answers: dict[str, dict[str, Any]] = {}
        self._seen = 0

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether a folder holds a study."""
        return (folder / _FILE).is_file()

    def _check(self, identity: Mapping[str, Any]) -> None:
        known = self._study.user_attrs.get("identity")
        plain = json.loads(json.dumps(identity))
        if known is None:
            self._study.set_user_attr("identity", plain)
            return
        for name, value in plain.items():
            if name == "job" and known.get(name) != value:
                raise UsageError(
                    f"study {self.folder} belongs to another job, or to this one before it was changed; give another folder"
                )
            if known.get(name) != value:
                raise UsageError(
                    f"study {self.folder} belongs to another search: its {name} is {_short(known.get(name))}, here it is "
                    f"{_short(value)}; give another folder"
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
        trials = self._study.get_trials(deepcopy=False)
        for trial in trials[self._seen :]:
            self._note(trial)
        self._seen = len(trials)
        return self._answers.get(key)

    def _note(self, trial: FrozenTrial) -> None:
        if "key" in trial.user_attrs:
            self._answers[trial.user_attrs["key"]] = trial.user_attrs["answer"]

    def record(
        self, key: str, answer: dict[str, Any], knobs: Mapping[str, str | int | bool], value: float | None
    ) -> None:
        """Keep an answer. `knobs` and `value` (milliseconds; None: none fits) are for who looks at the study with Optuna."""
        trial = create_trial(
            state=TrialState.FAIL if value is None else TrialState.COMPLETE,
            value=value,
            user_attrs={"key": key, "answer": answer, "knobs": dict(knobs)},
        )
        self._study.add_trial(trial)
        self._answers[key] = answer

    def __len__(self) -> int:
        self.answer("")
        return len(self._answers)


def _short(value: Any) -> str:
    text = printable(str(value))
    return text if len(text) <= 60 else f"{text[:57]}..."
