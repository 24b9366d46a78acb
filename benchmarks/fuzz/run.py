"""Running many trials: in worker processes, so that a trial that ends its process, or never ends, is a result like any other.

A worker runs at most `BATCH` trials, one after the other, and tells the parent when each begins and ends. If it dies or is
silent for too long, the trial that had begun is ``obscure`` and a new worker goes on with the next.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.fuzz.trial import Outcome

BATCH = 250
Key = tuple[str, int]  # a family and a number
SILENCE_S = 400.0
_WORST = ("wrong", "obscure", "stopped", "refused", "no reference", "warned", "right")

Report = Callable[[str, int, Outcome], None]


@dataclass
class _Work:
    """Trials that one worker runs."""

    trials: list[Key]
    process: Any = None
    pipe: Any = None
    current: Key | None = None
    heard: float = field(default_factory=time.monotonic)


def run(work: Sequence[tuple[str, list[int]]], report: Report, *, jobs: int, plans: Path) -> None:
    """Run the trials of each family and report every outcome. `plans`: the folder of the planner's plans."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["benchmarks.fuzz.families", "benchmarks.fuzz.run", "benchmarks.fuzz.plans", "autosac.api", "torch._dynamo"]
    )
    trials = [(family, number) for family, numbers in work for number in numbers]
    waiting = [_Work(trials[i : i + BATCH]) for i in range(0, len(trials), BATCH)]
    running: list[_Work] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_started(waiting.pop(0), context, plans))
            wait([one.pipe for one in running], timeout=1.0)
            for one in list(running):
                if not _heard(one, report):
                    continue
                running.remove(one)
                if one.trials:
                    waiting.insert(0, _Work(one.trials))
    finally:
        for one in running:
            _end(one)


def _started(one: _Work, context: Any, plans: Path) -> _Work:
    one.pipe, theirs = context.Pipe(duplex=False)
    one.process = context.Process(target=_worker, args=(theirs, list(one.trials), plans))
    one.process.start()
    theirs.close()
    one.heard = time.monotonic()
    return one


def _heard(one: _Work, report: Report) -> bool:
    """Take in what the worker has said; whether it has ended. What it has not run is left in `trials`."""
    try:
        while one.pipe.poll():
            key, outcome = one.pipe.recv()
            one.heard = time.monotonic()
            if outcome is None:
                one.current = key
            else:
                one.current = None
                one.trials.remove(key)
                report(key[0], key[1], outcome)
    except (EOFError, ConnectionResetError):
        one.process.join()
        _blame(one, f"the process ended with code {one.process.exitcode}", report)
        return True
    if time.monotonic() - one.heard > SILENCE_S:
        _end(one)
        _blame(one, f"the process was silent for {SILENCE_S:.0f} s", report)
        return True
    return False


def _blame(one: _Work, what: str, report: Report) -> None:
    key = one.current
    if key is None and one.trials:
        key = one.trials[0]  # it died before it could say what it began
    if key is not None:
        one.trials.remove(key)
        report(key[0], key[1], Outcome("obscure", what))


def _end(one: _Work) -> None:
    if one.process.is_alive():
        one.process.kill()
    one.process.join()


def _worker(pipe: Connection, trials: list[Key], plans: Path) -> None:
    from benchmarks.fuzz.compiling import family_of
    from benchmarks.fuzz.plans import Planner
    from benchmarks.fuzz.trial import Session

    with _silence():
        session = prepared(Session(Planner(plans)))
        for family, number in trials:
            pipe.send(((family, number), None))
            pipe.send(((family, number), one_trial(family_of(family), number, session)))
    pipe.close()


def prepared(session: Any) -> Any:
    """The session, in a process that runs trials: one thread, and the families loaded."""
    import torch

    import benchmarks.fuzz.families  # noqa: F401

    torch.set_num_threads(1)
    return session


def one_trial(family: Any, number: int, session: Any) -> Outcome:
    """One trial of the family, on as many processes as it needs. A compiler that fails may leave this one unusable."""
    from benchmarks.fuzz.trial import trial

    began = time.monotonic()
    alone = family.ranks == 1 and family.base is None
    outcome = trial(family, number, session) if alone else _on_ranks(family, number, session)
    return replace(outcome, seconds=time.monotonic() - began)


def _on_ranks(family: Any, number: int, session: Any) -> Outcome:
    """A trial on several ranks. The first that stops, is refused or fails decides: the others wait for it in vain."""
    context = multiprocessing.get_context("fork")
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="autosac-fuzz-") as folder:
        ranks: list[tuple[Any, Any]] = []
        for rank in range(family.ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(theirs, folder, rank, family, number, session))
            process.start()
            theirs.close()
            ranks.append((ours, process))
        # A rank alone counts the processor's time itself; several wait for each other.
        end = time.monotonic() + (family.limit_s + 20 if family.ranks > 1 else SILENCE_S - 20)
        pending: list[Any] = [pipe for pipe, _ in ranks]
        while pending and all(outcome.kind in ("right", "warned", "wrong") for outcome in outcomes):
            ready = wait(pending, timeout=max(0.0, end - time.monotonic()))
            if not ready:
                outcomes.append(Outcome("obscure", "a rank did not end within its time limit"))
            pipe: Any
            for pipe in ready:
                pending.remove(pipe)
                try:
                    outcomes.append(pipe.recv())
                except EOFError:
                    outcomes.append(Outcome("obscure", "a rank's process ended"))
        for _, process in ranks:
            process.kill()
            process.join()
    return min(outcomes, key=lambda outcome: _WORST.index(outcome.kind))


def _rank(pipe: Connection, folder: str, rank: int, family: Any, number: int, session: Any) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    from benchmarks.fuzz.trial import trial

    if family.ranks > 1:
        store = dist.FileStore(f"{folder}/store", family.ranks)  # type: ignore[attr-defined]
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=family.ranks, timeout=timedelta(seconds=family.limit_s)
        )
    pipe.send(trial(family, number, session))
    pipe.close()
    os._exit(0)  # do not wait for other ranks


@contextmanager
def _silence() -> Iterator[None]:
    """What models, warnings and libraries print goes nowhere."""
    sys.stdout.flush()
    sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    yield
