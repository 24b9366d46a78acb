"""What a search keeps in a folder, and the processes that work for it."""

from __future__ import annotations

import errno
import math
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
from optuna.storages.journal import JournalFileBackend

from autosac.configurations.evaluating.evaluations import PredictedStep
from autosac.configurations.evaluating.study import Study
from autosac.configurations.evaluating.workers import LocalWorkers, WorkerLost
from autosac.configurations.found.results import ConfigurationRow, Counts, SearchResult, why_lost
from autosac.configurations.space.layout import Layout
from autosac.configurations.space.offers import Offer
from autosac.errors import UsageError
from autosac.report.search_tables import notes

IDENTITY = {"job": "a", "gpus": [8]}


def test_a_study_is_continued(tmp_path: Path) -> None:
    """Answers are there again, also those that another search has added since; values are Optuna's."""
    first = Study(tmp_path / "s", IDENTITY, resume=False)
    first.record("a", {"ms": 3.0}, {"tensor": 2}, 3.0)
    second = Study(tmp_path / "s", IDENTITY, resume=True)
    assert second.answer("a") == {"ms": 3.0} and second.answer("b") is None and len(second) == 1
    first.record("b", {"refused": "no"}, {}, None)
    assert second.answer("b") == {"refused": "no"} and len(second) == 2


def spoil(folder: Path, text: str, other: str) -> int:
    """Change a study's journal."""
    journal = folder / "journal.log"
    return journal.write_text(journal.read_text().replace(text, other))


def test_what_a_killed_process_leaves_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a line at the end is cut off, a lock is taken after some seconds, also in a folder with a relative name."""
    monkeypatch.chdir(tmp_path)
    first = Study(Path("s"), IDENTITY, resume=False)
    first.record("a", {"ms": 3.0}, {}, 3.0)
    journal = tmp_path / "s" / "journal.log"
    whole = journal.read_bytes()
    journal.write_bytes(whole + whole.splitlines()[-1][:40])
    lock = journal.with_name("journal.log.lock")
    lock.symlink_to(journal)
    monkeypatch.setattr("time.monotonic", Clock())
    second = Study(Path("s"), IDENTITY, resume=True)
    assert journal.read_bytes().startswith(whole) and len(second) == 1
    second.record("b", {"ms": 4.0}, {}, 4.0)
    lock.symlink_to(tmp_path / "moved" / "journal.log")
    assert len(Study(Path("s"), IDENTITY, resume=True)) == 2 and not lock.is_symlink()


def test_a_full_disk_and_a_study_that_is_gone_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found before is kept, and a search that goes on finds it."""
    study = Study(tmp_path / "s", IDENTITY, resume=False)
    study.record("a", {"ms": 3.0}, {}, 3.0)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    remedy = f"--resume {tmp_path}/s continues once that is fixed"
    with monkeypatch.context() as patch:
        patch.setattr(JournalFileBackend, "append_logs", full)
        with pytest.raises(UsageError, match=f"^study {tmp_path}/s: No space left on device; {remedy}$"):
            study.record("b", {"ms": 4.0}, {}, 4.0)
        study.forget()
    assert len(Study(tmp_path / "s", IDENTITY, resume=True)) == 1
    (tmp_path / "s").rename(tmp_path / "moved")
    with pytest.raises(UsageError, match=f"^study {tmp_path}/s: No such file or directory; {remedy}$"):
        study.answer("c")


class Clock:
    """Six seconds pass between any two looks at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 6.0
        return self.now


def test_answers_that_were_changed_are_asked_for_again(tmp_path: Path) -> None:
    """A number of one of two answers is another one: nobody knows that answer any more."""
    first = Study(tmp_path / "s", IDENTITY, resume=False)
    first.record("a", {"ms": 3.0}, {}, 3.0)
    first.record("b", {"ms": 4.0}, {}, 4.0)
    spoil(tmp_path / "s", '"ms":3.0', '"ms":2.0')
    second = Study(tmp_path / "s", IDENTITY, resume=True)
    assert second.answer("a") is None and second.answer("b") == {"ms": 4.0}


@pytest.mark.parametrize(
    ("make", "resume", "message"),
    [
        (lambda folder: None, True, "there is no study (no journal.log); give --study"),
        (lambda folder: Study(folder, IDENTITY, resume=False), False, "holds a study: --resume"),
        (lambda folder: folder.write_text(""), False, "is a file: give a folder"),
        (
            lambda folder: Study(folder, {"job": "b" * 80, "gpus": [8]}, resume=False),
            True,
            "belongs to another job, or to this one before it was changed; give another folder",
        ),
        (
            lambda folder: Study(folder, {**IDENTITY, "gpus": "b" * 80}, resume=False),
            True,
            f"belongs to another search: its gpus is {'b' * 57}..., here it is [8]; give another folder",
        ),
        (
            lambda folder: (folder.mkdir(), (folder / "journal.log").write_text("{nothing\n{}\n")),
            True,
            "journal.log is damaged (ValueError: it is no journal); give another folder",
        ),
        (
            lambda folder: (Study(folder, IDENTITY, resume=False), spoil(folder, '"study_id":0', '"study_id":[]')),
            True,
            "journal.log is damaged (TypeError: unhashable type: 'list'); give another folder",
        ),
        (lambda folder: (folder / "journal.log").mkdir(parents=True), False, "give a folder that can be written"),
    ],
)
def test_folders_that_are_refused(make: Any, resume: bool, message: str, tmp_path: Path) -> None:
    """One line that says why, and what to give instead."""
    make(tmp_path / "s")
    with pytest.raises(UsageError) as caught:
        Study(tmp_path / "s", IDENTITY, resume=resume)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("answer", "kept"), [(None, False), ({"refused": "no"}, False), ({"ms": 1.0}, True)])
def test_a_search_that_could_not_start_leaves_no_study(answer: Any, kept: bool, tmp_path: Path) -> None:
    """Without answers but refusals it is removed, with its folder; one with answers stays."""
    study = Study(tmp_path / "s", IDENTITY, resume=False)
    if answer is not None:
        study.record("a", answer, {}, None)
    study.forget()
    assert (tmp_path / "s" / "journal.log").is_file() == kept == (tmp_path / "s").exists()


def test_what_was_there_before_is_not_forgotten(tmp_path: Path) -> None:
    """A study that is continued, and other files in the folder."""
    Study(tmp_path / "s", IDENTITY, resume=False)
    Study(tmp_path / "s", IDENTITY, resume=True).forget()
    assert (tmp_path / "s" / "journal.log").is_file()
    new = Study(tmp_path / "t", IDENTITY, resume=False)
    (tmp_path / "t" / "notes").write_text("mine")
    new.forget()
    assert [path.name for path in (tmp_path / "t").iterdir()] == ["notes"]


@dataclass(frozen=True)
class Ask:
    """A task that answers at once, or ends its process."""

    ends: bool
    gpu: None = None

    def run(self, server: Any) -> dict[str, Any]:
        """The process's number."""
        if self.ends:
            os._exit(1)
        return {"pid": os.getpid()}


def test_workers_are_started_again() -> None:
    """A process that ends loses its task; the next task finds another one. Closing ends them, twice is no mistake."""
    workers = LocalWorkers(1, use_cache=False)
    workers.close()
    try:
        first = workers.submit(Ask(ends=False)).result(60)["pid"]
        with pytest.raises(WorkerLost):
            workers.submit(Ask(ends=True)).result(60)
        second = workers.submit(Ask(ends=False)).result(60)["pid"]
        assert len({first, second, os.getpid()}) == 3
    finally:
        workers.close()
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)
    workers.close()


def row(step_ms: float, *, price: float = 0.0, score: float | None = None, **parts: float) -> ConfigurationRow:
    """A configuration with these parts of its step."""
    measured = PredictedStep(
        checkpointing="none",
        step_ms=step_ms,
        recompute_ms=parts.get("recompute_ms", 0.0),
        peak_reserved_bytes=1,
        fits=True,
        tokens_per_second=1.0,
        mfu=0.1,
        parts=parts,
        errors_ms={},
    )
    offer = Offer(gpu="any", world_size=8, price=price)
    return ConfigurationRow(layout=Layout(gpu="any"), measured=measured, score=score or step_ms, offer=offer)


def test_why_another_configuration_is_worse() -> None:
    """The part that is longer by most; the price where no part is longer; nothing where it is no worse."""
    best = row(10, compute_ms=8, bubble_ms=1)
    assert why_lost(best, row(13, compute_ms=9, bubble_ms=3)) == "2.0 ms more pipeline bubble"
    assert why_lost(best, row(13, compute_ms=11, recompute_ms=2, bubble_ms=2)) == "2.0 ms more recomputation"
    assert why_lost(best, row(9, compute_ms=8)) == "" == why_lost(best, row(10, compute_ms=9))
    assert why_lost(best, row(10, compute_ms=8, price=2.0, score=20)) == "its price"
    assert why_lost(best, row(11, compute_ms=8)) == "its interference"


def test_what_limits_a_configuration() -> None:
    """Memory if recomputation is the longest part and counts, a part of more than a tenth of the step, else computation."""
    assert row(100, compute_ms=90, bubble_ms=10).binds == "compute"
    assert row(100, compute_ms=80, bubble_ms=10.1, exposed_copy_ms=9).binds == "pipeline bubble"
    assert row(100, compute_ms=80, bubble_ms=12, recompute_ms=12).binds == "pipeline bubble"
    assert row(100, compute_ms=80, bubble_ms=12, recompute_ms=12.1).binds == "memory"
    assert row(100, compute_ms=98, recompute_ms=2.0).binds == "compute"
    assert row(100, compute_ms=98, recompute_ms=2.1).binds == "memory"


def test_kinds_of_gpus_that_bounds_ruled_out_are_named() -> None:
    """Of three kinds one is simulated; of the others one is half as good at best, and nothing fits the other."""
    best = row(10.0)
    offers = tuple(Offer(gpu=gpu, world_size=8) for gpu in ("any", "slow", "small"))
    numbers = {field.name: 0 for field in fields(Counts)}
    result = SearchResult(
        rows=(best,),
        counts=Counts(**numbers),
        objective="tokens-per-second",
        gap=0.0,
        proven=True,
        offers=offers,
        kinds={"any": 11.0, "slow": 20.0, "small": math.inf},
    )
    told = notes(result)
    assert "8 x slow: ruled out by bounds, at least 100.0% behind" in told and "8 x small: nothing fits" in told
    assert not any(note.startswith("8 x any:") for note in told)
    interrupted = replace(result, counts=replace(result.counts, legal=1), proven=False)
    assert not any(note.startswith("8 x") for note in notes(interrupted))
