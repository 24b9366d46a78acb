"""The journal of a calibration: what it keeps of what was measured, through interruptions."""

from __future__ import annotations

from pathlib import Path

import pytest

from autosac.errors import UsageError
from autosac.estimator.calibration.journal import Journal

MACHINE = {"name": "m"}


def test_the_journal_survives_a_cut_line(tmp_path: Path) -> None:
    """A line that was cut off is dropped; an operator that was begun and never done is skipped."""
    path = tmp_path / "j"
    with Journal(path, MACHINE, resume=False) as journal:
        journal.finish("a", 1.0, 0.1)
        journal.begin("b")
    with path.open("a") as file:
        file.write('{"key": "c", "m')
    with Journal(path, MACHINE, resume=True) as journal:
        assert journal.done == {"a": (1.0, 0.1)}
        assert list(journal.skipped) == ["b"] and "ended the process" in journal.skipped["b"]
        journal.finish("d", 2.0, 0.0)
    with Journal(path, MACHINE, resume=True) as journal:
        assert set(journal.done) == {"a", "d"}


def test_the_mean_of_several_measurements_counts(tmp_path: Path) -> None:
    """Of 2 and 4 ms with errors of 30 and 40 % the mean is 3 ms with 25 %, also after the journal is read again."""
    path = tmp_path / "j"
    with Journal(path, MACHINE, resume=False) as journal:
        journal.finish("a", 2.0, 0.3)
        journal.finish("a", 4.0, 0.4)
        assert journal.done["a"] == pytest.approx((3.0, 0.25))
    with Journal(path, MACHINE, resume=True) as journal:
        assert journal.done["a"] == pytest.approx((3.0, 0.25)) and journal.times["a"] == 2


def test_times_that_are_none_are_measured_again(tmp_path: Path) -> None:
    """NaN, zero and negative times in a journal do not count as measured."""
    path = tmp_path / "j"
    with Journal(path, MACHINE, resume=False) as journal:
        for key, ms in (("a", float("nan")), ("b", 0.0), ("c", -1.0)):
            journal.finish(key, ms, 0.0)
    with Journal(path, MACHINE, resume=True) as journal:
        assert journal.done == {} and journal.skipped == {}


def test_a_journal_of_another_machine(tmp_path: Path) -> None:
    """It is refused, and so is a file that is no journal."""
    path = tmp_path / "j"
    Journal(path, MACHINE, resume=False).__exit__(None, None, None)
    with pytest.raises(UsageError, match="another machine"):
        Journal(path, {"name": "other"}, resume=True)
    path.write_text("text\n")
    with pytest.raises(UsageError, match="not the journal"):
        Journal(path, MACHINE, resume=True)


def test_what_cannot_be_measured_is_not_tried_again(tmp_path: Path) -> None:
    """The reason is kept; an operator that was skipped, or measured, after it was begun did not end the process."""
    path = tmp_path / "j"
    with Journal(path, MACHINE, resume=False) as journal:
        for key in ("a", "b"):
            journal.begin(key)
        journal.skip("a", "no such operator")
        journal.finish("b", 1.0, 0.0)
        assert journal.skipped == {"a": "no such operator"}
    with Journal(path, MACHINE, resume=True) as journal:
        assert journal.skipped == {"a": "no such operator"} and journal.done == {"b": (1.0, 0.0)}


def test_an_unfinished_journal_is_continued_only_if_asked(tmp_path: Path) -> None:
    """UsageError without resume, and nothing is lost; it is gone when everything has been measured."""
    path = tmp_path / "j"
    with Journal(path, MACHINE, resume=False) as journal:
        journal.finish("a", 1.0, 0.0)
    with pytest.raises(UsageError, match="--resume"):
        Journal(path, MACHINE, resume=False)
    journal = Journal(path, MACHINE, resume=True)
    assert journal.done == {"a": (1.0, 0.0)}
    journal.remove()
    assert not path.exists()
